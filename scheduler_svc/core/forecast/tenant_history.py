"""What each tenant of one class has asked for lately: its share of the load, and how long its prompts and answers are.

Knows sums that fade. A tenant's own arrivals are too few to learn from alone, so its forecast is its share of its class's, and
its lengths lean on those of the class until it has shown its own.
"""

from dataclasses import dataclass, field

from scheduler_svc.core.forecast.quantity import Quantity

_HALF_LIFE_S = 300.0
_MAX_TENANTS = 4096
_LEAN_REQUESTS = 8.0
"""So many requests of the class count beside a tenant's own."""
_UNKNOWN_TOKENS = {Quantity.PROMPT_TOKENS: 512.0, Quantity.OUTPUT_TOKENS: 128.0}
"""Of a request, before the first."""


@dataclass(slots=True)
class _Sums:
    at_s: float = 0.0
    of: dict[Quantity, float] = field(default_factory=lambda: dict.fromkeys(Quantity, 0.0))
    num_ended: float = 0.0

    def fade(self, now_s: float) -> None:
        keep = 0.5 ** (max(0.0, now_s - self.at_s) / _HALF_LIFE_S)
        self.of = {quantity: keep * total for quantity, total in self.of.items()}
        self.num_ended *= keep
        self.at_s = max(self.at_s, now_s)


class TenantHistory:
    """Of one class."""

    def __init__(self) -> None:
        self._all = _Sums()
        self._tenants: dict[str, _Sums] = {}

    def note_arrival(self, tenant: str, num_prompt_tokens: int, now_s: float) -> None:
        """A request came."""
        for sums in (self._all, self._of(tenant)):
            sums.fade(now_s)
            sums.of[Quantity.REQUESTS] += 1
            sums.of[Quantity.PROMPT_TOKENS] += num_prompt_tokens

    def note_end(self, tenant: str, num_output_tokens: int, now_s: float) -> None:
        """A request ended by itself."""
        for sums in (self._all, self._of(tenant)):
            sums.fade(now_s)
            sums.num_ended += 1
            sums.of[Quantity.OUTPUT_TOKENS] += num_output_tokens

    def share(self, tenant: str, quantity: Quantity, now_s: float) -> float:
        """Of the class's load, 0..1."""
        sums = self._tenants.get(tenant)
        if sums is None:
            return 0.0
        for one in (self._all, sums):
            one.fade(now_s)
        return min(1.0, sums.of[quantity] / self._all.of[quantity]) if self._all.of[quantity] else 0.0

    def mean_tokens(self, quantity: Quantity, tenant: str = "") -> float:
        """Of a request's prompt or answer.

        Args:
            quantity: PROMPT_TOKENS or OUTPUT_TOKENS.
            tenant: whose; empty: anybody's.
        """
        total = self._all
        of_class = total.of[quantity] / num if (num := _num_seen(total, quantity)) else _UNKNOWN_TOKENS[quantity]
        sums = self._tenants.get(tenant)
        if sums is None:
            return of_class
        return (sums.of[quantity] + _LEAN_REQUESTS * of_class) / (_num_seen(sums, quantity) + _LEAN_REQUESTS)

    @property
    def tenants(self) -> list[str]:
        """Those that are remembered."""
        return list(self._tenants)

    def _of(self, tenant: str) -> _Sums:
        if tenant not in self._tenants and len(self._tenants) >= _MAX_TENANTS:
            by_age = sorted(self._tenants, key=lambda name: self._tenants[name].at_s)
            for name in by_age[: _MAX_TENANTS // 2]:
                del self._tenants[name]
        return self._tenants.setdefault(tenant, _Sums())


def _num_seen(sums: _Sums, quantity: Quantity) -> float:
    return sums.num_ended if quantity is Quantity.OUTPUT_TOKENS else sums.of[Quantity.REQUESTS]
