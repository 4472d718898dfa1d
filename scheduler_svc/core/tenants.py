"""What each tenant is entitled to. Plain data; where it comes from is the shell's business."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_svc.core.request import ServiceClass


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """Of one tenant.

    Attributes:
        weight: its share beside others that wait, above 0.
        default_class: of its requests that name none.
        max_waiting_requests, max_waiting_tokens: of its own in one executor's queue; None: the queue's bounds alone.
        tokens_per_s: prompt tokens and max_tokens that it may ask for in the long run; None: any number.
        burst_tokens: that it may ask for at once.
    """

    weight: float = 1.0
    default_class: ServiceClass = ServiceClass.STANDARD
    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tenants:
    """Terms by name.

    Attributes:
        by_name: of those with terms of their own.
        others: of everybody else, each for itself.
    """

    by_name: Mapping[str, TenantTerms] = field(default_factory=dict)
    others: TenantTerms = TenantTerms()

    def terms(self, tenant: str) -> TenantTerms:
        """Of a tenant."""
        return self.by_name.get(tenant, self.others)


EQUALS = Tenants()
"""Nobody has terms of its own."""
