"""The limits of a core as a record, and back. Knows both shapes; makes no core."""

from collections.abc import Callable

from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.core.tenants import Tenants, TenantTerms
from scheduler_svc.recording.plain_fields import PlainFields

_CONFIG = PlainFields(SchedulerConfig, pb.Start, elsewhere=("tenants",))
_TERMS = PlainFields(TenantTerms, pb.TenantTerms, elsewhere=("default_class",))
_OTHERS = ""


def start_of(config: SchedulerConfig, run_ahead: int, policy: str, tenant: Callable[[str], str]) -> pb.Start:
    """The record of a core that is made.

    Args:
        config: its limits.
        run_ahead: most steps under way.
        policy: name of it.
        tenant: what stands for a tenant's name.
    """
    start = pb.Start(run_ahead=run_ahead, policy=policy)
    _CONFIG.write(config, start)
    for name, terms in {**config.tenants.by_name, _OTHERS: config.tenants.others}.items():
        record = start.tenants[tenant(name)]
        record.default_class = terms.default_class
        _TERMS.write(terms, record)
    return start


def config_of(start: pb.Start) -> SchedulerConfig:
    """The limits of a recorded core."""
    terms = {
        name: TenantTerms(default_class=ServiceClass(record.default_class), **_TERMS.read(record))
        for name, record in start.tenants.items()
    }
    others = terms.pop(_OTHERS, TenantTerms())
    return SchedulerConfig(tenants=Tenants(terms, others), **_CONFIG.read(start))
