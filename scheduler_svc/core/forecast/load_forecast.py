"""What load is to come, by class and tenant. Pure: told of every arrival and end with the time; works in whole seconds.

    forecast = LoadForecast()
    forecast.note_arrival("interactive", "tenant", num_prompt_tokens, now_s)
    forecast.note_end("interactive", "tenant", num_output_tokens, now_s)
    forecast.advance(now_s)                                      # at least once a second or so, also when nothing comes
    forecast.expect(Quantity.PROMPT_TOKENS, 10).quantile(0.9)    # of all: tokens in the next 10 s

Output tokens are counted when their request ends. Each class has series of its own beside those of all; a tenant gets its share
of its class's.
"""

from collections.abc import Iterator

from scheduler_svc.core.forecast.errors import ForecastErrors
from scheduler_svc.core.forecast.forecast import NOTHING, Forecast
from scheduler_svc.core.forecast.quantity import Quantity
from scheduler_svc.core.forecast.series import CountSeries
from scheduler_svc.core.forecast.tenant_history import TenantHistory

HORIZONS_S = (10, 60)
ALL = ""
"""The class of everything."""
_MAX_IDLE_S = 120
"""Seconds that are made up for at once, after a pause of the process."""


class LoadForecast:
    """See the module's first lines."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, Quantity], CountSeries] = {}
        self._counts: dict[tuple[str, Quantity], float] = {}
        self._histories: dict[str, TenantHistory] = {}
        self._second: int | None = None
        self._now_s = 0.0
        self._add_class(ALL)

    @property
    def service_classes(self) -> list[str]:
        """Those that were seen, ALL first."""
        return list(self._histories)

    def note_arrival(self, service_class: str, tenant: str, num_prompt_tokens: int, now_s: float) -> None:
        """A request came, whether it was let in or not."""
        self.advance(now_s)
        for name in self._names(service_class):
            self._counts[name, Quantity.REQUESTS] += 1
            self._counts[name, Quantity.PROMPT_TOKENS] += num_prompt_tokens
            self._histories[name].note_arrival(tenant, num_prompt_tokens, now_s)

    def note_end(self, service_class: str, tenant: str, num_output_tokens: int, now_s: float) -> None:
        """A request ended by itself."""
        self.advance(now_s)
        for name in self._names(service_class):
            self._counts[name, Quantity.OUTPUT_TOKENS] += num_output_tokens
            self._histories[name].note_end(tenant, num_output_tokens, now_s)

    def advance(self, now_s: float) -> None:
        """Time goes on: seconds that are over are learned from."""
        self._now_s = now_s
        second = int(now_s)
        if self._second is None:
            self._second = second
        for _ in range(min(second - self._second, _MAX_IDLE_S)):
            for key, series in self._series.items():
                series.note(self._counts[key])
                self._counts[key] = 0.0
        self._second = max(self._second, second)

    def expect(self, quantity: Quantity, horizon_s: int, service_class: str = ALL, tenant: str | None = None) -> Forecast:
        """What comes in the next seconds.

        Args:
            quantity: of what.
            horizon_s: one of HORIZONS_S.
            service_class: of whom; ALL: of everybody.
            tenant: of this one alone; None: of all.
        """
        series = self._series.get((service_class, quantity))
        if series is None:
            return Forecast(horizon_s, NOTHING)
        newest = series.horizons[horizon_s].newest
        if tenant is None:
            return newest
        return newest.times(self._histories[service_class].share(tenant, quantity, self._now_s))

    def expect_blocks(self, horizon_s: int, block_size: int, service_class: str = ALL) -> Forecast:
        """Blocks that the requests of the next seconds need, prompts and answers."""
        tokens = [self.expect(q, horizon_s, service_class) for q in (Quantity.PROMPT_TOKENS, Quantity.OUTPUT_TOKENS)]
        requests = self.expect(Quantity.REQUESTS, horizon_s, service_class)
        parts = zip(requests.quantiles, *(forecast.quantiles for forecast in tokens), strict=True)
        # The last block of a request is half empty on average.
        return Forecast(horizon_s, tuple(num / 2 + (prompt + output) / block_size for num, prompt, output in parts))

    def mean_tokens(self, quantity: Quantity, service_class: str = ALL, tenant: str = "") -> float:
        """Of a request's prompt or answer, as they were lately.

        Args:
            quantity: PROMPT_TOKENS or OUTPUT_TOKENS.
            service_class: of whom; ALL: of everybody.
            tenant: whose; empty: anybody's.
        """
        history = self._histories.get(service_class, self._histories[ALL])
        return history.mean_tokens(quantity, tenant)

    def tenants(self, service_class: str = ALL) -> list[str]:
        """Those of a class that are remembered."""
        return self._histories[service_class].tenants if service_class in self._histories else []

    def errors(self) -> Iterator[tuple[str, Quantity, int, ForecastErrors]]:
        """By class, quantity and horizon."""
        for (service_class, quantity), series in self._series.items():
            for horizon_s, horizon in series.horizons.items():
                yield service_class, quantity, horizon_s, horizon.errors

    def _names(self, service_class: str) -> tuple[str, ...]:
        if service_class == ALL:
            return (ALL,)
        if service_class not in self._histories:
            self._add_class(service_class)
        return ALL, service_class

    def _add_class(self, service_class: str) -> None:
        self._histories[service_class] = TenantHistory()
        for quantity in Quantity:
            self._series[service_class, quantity] = CountSeries(HORIZONS_S)
            self._counts[service_class, quantity] = 0.0
