"""Executors join and leave while requests run: clients notice nothing, and operators see what happens."""

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from octavo.scheduler.v1 import admin_service_pb2 as admin_pb
from tests.contract.errors import seen
from tests.integration.scheduler_svc.conftest import Serve, Served, stream_tokens, tokens_request, until
from tests.integration.scheduler_svc.fake_executor import FakeExecutor, FakeExecutorProcess, continuation, fake_info

PROMPT = [5, 6, 7, 8, 9, 10, 11]


async def remove(served: Served, address: str, drain_s: float) -> admin_pb.ExecutorStatus:
    request = admin_pb.RemoveExecutorRequest(address=address)
    request.drain.FromNanoseconds(int(drain_s * 1e9))
    return (await served.admin.RemoveExecutor(request)).executor


async def add(served: Served, address: str) -> admin_pb.ExecutorStatus:
    return (await served.admin.AddExecutor(admin_pb.AddExecutorRequest(address=address))).executor


async def told_to_leave_again(served: Served, address: str, drain_s: float) -> None:
    """It may have gone before it hears that."""
    try:
        await remove(served, address, drain_s)
    except grpc.aio.AioRpcError as error:
        assert seen(error).code is grpc.StatusCode.INVALID_ARGUMENT and "is no executor" in str(error.details())


async def both_connected(served: Served) -> None:
    await until(lambda: [driver.is_connected for driver in served.app.engine.drivers] == [True, True])


async def test_an_executor_joins_while_others_are_busy_and_takes_its_part(serve: Serve, tmp_path: Path) -> None:
    async with serve(info={"max_num_seqs": 1}) as served:
        new = FakeExecutorProcess(FakeExecutor(fake_info(executor_id="new", max_num_seqs=1)), f"unix:{tmp_path}/new.sock")
        await new.start()
        served.fake.gate.clear()
        first = asyncio.create_task(stream_tokens(served, tokens_request([*PROMPT, 0], 20)))
        await until(lambda: served.app.engine.num_open_requests == 1)
        assert (await add(served, new.target)).address == new.target
        await both_connected(served)
        # The only one with a free place; the other is held back by the gate.
        assert await stream_tokens(served, tokens_request([1, *PROMPT], 20)) == continuation([1, *PROMPT], 20)
        served.fake.gate.set()
        assert await first == continuation([*PROMPT, 0], 20)
        statuses = (await served.admin.GetServerInfo(admin_pb.GetServerInfoRequest())).executors
        assert [status.connected for status in statuses] == [True, True]
        await remove(served, new.target, 5)
        await until(lambda: len(served.app.engine.drivers) == 1)
        await new.kill()


async def test_who_waits_moves_at_once_and_who_runs_ends_where_it_is(serve: Serve) -> None:
    async with serve(num_executors=2, info={"max_num_seqs": 1}) as served:
        first, second = served.app.engine.drivers
        await both_connected(served)
        for process in served.executors:
            process.executor.gate.clear()
        streams = [asyncio.create_task(stream_tokens(served, tokens_request([*PROMPT, i], 10))) for i in range(6)]
        await until(lambda: first.stats().num_running_requests + second.stats().num_running_requests == 2)
        await until(lambda: len(first.generations) + len(second.generations) == 6)
        status = await remove(served, first.address, 30)
        assert status.leaving and status.num_requests == 1
        assert len(second.generations) == 5
        served.check_integrity()
        served.executors[0].executor.gate.set()
        await until(lambda: len(served.app.engine.drivers) == 1 and not first.is_connected)
        assert first.totals.num_steps >= 10
        served.executors[1].executor.gate.set()
        assert await asyncio.gather(*streams) == [continuation([*PROMPT, i], 10) for i in range(6)]
        served.check_integrity()


async def test_who_does_not_end_in_time_goes_on_elsewhere_with_the_same_tokens(serve: Serve) -> None:
    async with serve(num_executors=2) as served:
        first, second = served.app.engine.drivers
        await both_connected(served)
        for process in served.executors:
            process.executor.gate.clear()
        streams = [asyncio.create_task(stream_tokens(served, tokens_request([*PROMPT, i], 60))) for i in range(6)]
        await until(lambda: len(first.generations) > 1 and len(second.generations) > 1)
        await until(lambda: first.totals.num_steps > 10, served.fake.gate.let_one_through)
        await remove(served, first.address, 0)
        await until(lambda: len(served.app.engine.drivers) == 1)
        served.executors[0].executor.gate.set()
        served.executors[1].executor.gate.set()
        assert await asyncio.gather(*streams) == [continuation([*PROMPT, i], 60) for i in range(6)]
        served.check_integrity()


async def test_what_an_executor_has_computed_is_in_the_store_before_it_leaves(serve: Serve, tmp_path: Path) -> None:
    async with serve(info={"kv_transport": "shm"}, kvstore=f"unix:{tmp_path}/executor-0.sock") as served:
        (only,) = served.app.engine.drivers
        await stream_tokens(served, tokens_request(PROMPT, 10))
        await remove(served, only.address, 30)
        await until(lambda: not served.app.engine.drivers)
        assert len(served.fake.stored) == (len(PROMPT) + 9) // 4


async def test_a_leaving_executor_gets_nothing_new_and_may_be_asked_to_stay(serve: Serve) -> None:
    async with serve(num_executors=2) as served:
        first, second = served.app.engine.drivers
        await both_connected(served)
        served.fake.gate.clear()
        streams: list[asyncio.Task[Any]] = []
        while not first.generations:  # the other one may be expected to be through sooner
            streams.append(asyncio.create_task(stream_tokens(served, tokens_request([*PROMPT, len(streams)], 20))))
            await until(lambda: bool(first.generations) or streams[-1].done())
        num_held = len(first.generations)
        await remove(served, first.address, 30)
        for i in range(10, 14):
            assert await stream_tokens(served, tokens_request([*PROMPT, i], 5)) == continuation([*PROMPT, i], 5)
        assert len(first.generations) == num_held
        assert not (await add(served, first.address)).leaving
        served.fake.gate.set()
        assert await asyncio.gather(*streams) == [continuation([*PROMPT, i], 20) for i in range(len(streams))]
        assert served.app.engine.drivers == [first, second]


async def test_without_another_executor_the_last_ones_requests_get_their_time_and_then_a_clear_error(serve: Serve) -> None:
    async with serve(executor_wait_s=0.01) as served:
        served.fake.gate.clear()
        stream = asyncio.create_task(stream_tokens(served, tokens_request(PROMPT, 20)))
        await until(lambda: served.app.engine.num_open_requests == 1)
        await remove(served, served.executors[0].target, 0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream
        assert seen(caught.value).reason == "EXECUTOR_LOST"
        served.fake.gate.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream_tokens(served, tokens_request(PROMPT, 20))
        assert seen(caught.value).reason == "NO_EXECUTOR"
        await add(served, served.executors[0].target)
        await until(lambda: any(driver.is_connected for driver in served.app.engine.drivers))
        assert await stream_tokens(served, tokens_request(PROMPT, 20)) == continuation(PROMPT, 20)


@pytest.mark.parametrize("address", ["", "nonsense", "unix:"])
async def test_what_is_no_address_cannot_join(serve: Serve, address: str) -> None:
    async with serve() as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await add(served, address)
        assert seen(caught.value).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_nobody_joins_twice_and_no_stranger_leaves(serve: Serve) -> None:
    async with serve() as served:
        for call in (add(served, served.executors[0].target), remove(served, "stranger:1", 0), remove(served, "x", -1)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert seen(caught.value).code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("seed", range(2))
async def test_any_coming_and_going_leaves_the_tokens_as_they_are(serve: Serve, seed: int) -> None:
    async with serve(num_executors=3, info={"max_num_seqs": 2, "num_blocks": 24}, executor_wait_s=5.0) as served:
        rng = random.Random(seed)
        targets = [process.target for process in served.executors]
        await until(lambda: all(driver.is_connected for driver in served.app.engine.drivers))

        async def come_and_go() -> None:
            for _ in range(12):
                target = rng.choice(targets[1:])  # one stays
                there = {driver.address: driver for driver in served.app.engine.drivers}
                if target not in there:
                    await add(served, target)
                elif served.app.engine.fleet.is_leaving(there[target]):
                    await told_to_leave_again(served, target, rng.choice([0.0, 0.02, 5.0]))
                else:
                    await remove(served, target, rng.choice([0.0, 0.02, 5.0]))
                await asyncio.sleep(rng.random() * 0.05)

        async def ask(i: int) -> None:
            await asyncio.sleep(rng.random() * 0.5)
            assert await stream_tokens(served, tokens_request([*PROMPT, i], 15)) == continuation([*PROMPT, i], 15)

        await asyncio.gather(come_and_go(), *(ask(i) for i in range(40)))
        served.check_integrity()
        await until(lambda: not any(driver.stats().num_used_blocks for driver in served.app.engine.drivers))
