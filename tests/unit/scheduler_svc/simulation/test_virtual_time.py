"""Time that is made up: timers in their order, no waiting, and no standing still."""

import asyncio
import time

import pytest

from scheduler_svc.simulation.virtual_time import VirtualTimeLoop


def test_an_hour_of_timers_takes_no_time_and_keeps_their_order() -> None:
    seen: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(wait("hour", 3600), wait("second", 1), wait("minute", 60))

    began_s = time.monotonic()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    assert seen == [("second", 1.0), ("minute", 60.0), ("hour", 3600.0)]
    assert time.monotonic() - began_s < 60


def test_who_is_busy_holds_up_the_others() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.call_later(1.0, loop.spend, 5.0)
        await asyncio.sleep(2.0)
        return loop.time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main()) == 6.0


def test_waiting_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.raises(RuntimeError, match="stands still"):
        runner.run(main())
