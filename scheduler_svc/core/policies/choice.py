"""The policies by name, each made for one executor. The one place to add one to."""

from collections.abc import Callable, Mapping

from scheduler_svc.core.policies.fair_share import FairShare
from scheduler_svc.core.policies.fcfs import Fcfs
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.policies.strict_priority import StrictPriority
from scheduler_svc.core.tenants import Tenants

POLICIES: Mapping[str, Callable[[Tenants], Policy]] = {
    "fair": lambda tenants: FairShare(tenants),
    "fcfs": lambda tenants: Fcfs(),
    "priority": lambda tenants: StrictPriority(),
}
