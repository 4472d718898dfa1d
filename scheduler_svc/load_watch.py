"""Feeds the load forecast with what happens, and asks it: how long answers will be, how many executors are wanted.

Knows the clock and the executors; forecasts themselves are the core's.
"""

import asyncio
from collections.abc import Callable, Sequence

from common.clock import Clock
from scheduler_svc.core.forecast.capacity import SURE, Demand, ExecutorCapacity, desired_executors
from scheduler_svc.core.forecast.load_forecast import LoadForecast
from scheduler_svc.core.forecast.quantity import Quantity
from scheduler_svc.core.request import Request
from scheduler_svc.driver import ExecutorDriver
from scheduler_svc.generation import Generation

SCALING_HORIZON_S = 60
"""An executor takes about so long to start."""
SAVING_HORIZON_S = 10
"""Blocks wait about so long to be saved where copies take time from computing."""


class LoadWatch:
    """See the module's first lines.

    Attributes:
        forecast: of all arrivals.
    """

    def __init__(self, clock: Clock):
        self.forecast = LoadForecast()
        self._clock = clock
        self._num_prompt_tokens = 0.0
        self._num_cached_tokens = 0.0

    async def run(self, drivers: Callable[[], Sequence[ExecutorDriver]]) -> None:
        """Lets the forecast know that time goes on, and the executors what they may expect; never returns."""
        while True:
            self.forecast.advance(self._clock.now())
            connected = [driver for driver in drivers() if driver.is_connected]
            for driver in connected:
                assert driver.info is not None, f"{driver.address} is connected"
                expected = self.forecast.expect_blocks(SAVING_HORIZON_S, driver.info.block_size).quantile(SURE)
                driver.expect_blocks(expected / len(connected))
            await asyncio.sleep(1.0)

    def note_arrival(self, request: Request) -> None:
        """A request came, whether it is let in or not."""
        service_class, tenant = _payer(request)
        self.forecast.note_arrival(service_class, tenant, len(request.prompt_token_ids), self._clock.now())

    def note_end(self, generation: Generation) -> None:
        """A request ended; those that were cut short say nothing about lengths."""
        if generation.is_cancelled or generation.output.error is not None:
            return
        service_class, tenant = _payer(generation.request)
        self.forecast.note_end(service_class, tenant, generation.output.num_tokens, self._clock.now())
        self._num_prompt_tokens = 0.99 * self._num_prompt_tokens + len(generation.request.prompt_token_ids)
        self._num_cached_tokens = 0.99 * self._num_cached_tokens + generation.num_cached_tokens

    @property
    def computed_share(self) -> float:
        """Of prompt tokens, lately: those that were not cached."""
        return 1.0 - self._num_cached_tokens / self._num_prompt_tokens if self._num_prompt_tokens else 1.0

    def expected_output_tokens(self, request: Request) -> float:
        """That a sample of the request will probably get."""
        service_class, tenant = _payer(request)
        mean = self.forecast.mean_tokens(Quantity.OUTPUT_TOKENS, service_class, tenant) / request.n
        return max(1.0, min(float(request.stop.max_tokens), mean))

    def demand(self, drivers: Sequence[ExecutorDriver]) -> Demand:
        """What has to be computed in the next minute: as much as will probably not be exceeded, and what waits now."""
        prompt, output = (
            self.forecast.expect(quantity, SCALING_HORIZON_S).quantile(SURE)
            for quantity in (Quantity.PROMPT_TOKENS, Quantity.OUTPUT_TOKENS)
        )
        stats = [driver.stats() for driver in drivers]
        num_waiting = sum(s.num_waiting_requests for s in stats)
        waiting_output = num_waiting * self.forecast.mean_tokens(Quantity.OUTPUT_TOKENS)
        num_waiting_tokens = sum(s.num_waiting_tokens for s in stats)
        return Demand(self.computed_share * (prompt + num_waiting_tokens), output + waiting_output, SCALING_HORIZON_S)

    def desired_executors(self, drivers: Sequence[ExecutorDriver]) -> int:
        """How many executors the next minute wants."""
        mean_prompt, mean_output = (
            self.forecast.mean_tokens(quantity) for quantity in (Quantity.PROMPT_TOKENS, Quantity.OUTPUT_TOKENS)
        )
        known = [capacity for driver in drivers if (capacity := driver.capacity(mean_prompt + mean_output / 2)) is not None]
        mean = None
        if known:
            prompt_s, output_s = (sum(times) / len(known) for times in zip(*(_times(one) for one in known), strict=True))
            mean = ExecutorCapacity(prompt_s, output_s)
        return desired_executors(mean, self.demand(drivers), sum(driver.is_connected for driver in drivers))


def _times(capacity: ExecutorCapacity) -> tuple[float, float]:
    return capacity.prompt_token_s, capacity.output_token_s


def _payer(request: Request) -> tuple[str, str]:
    """Class and tenant of a request."""
    return request.service_class.name.lower(), request.tenant
