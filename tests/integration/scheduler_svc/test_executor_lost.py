"""Executors that die and come back: clients see a pause, the same tokens, and after a while a clear error."""

import asyncio

import grpc
import grpc.aio
import pytest

from tests.contract.errors import seen
from tests.integration.scheduler_svc.conftest import Serve, stream_tokens, tokens_request, until
from tests.integration.scheduler_svc.fake_executor import continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11]


async def test_a_stream_goes_on_with_the_same_tokens_after_its_executor_came_back(serve: Serve) -> None:
    async with serve() as served:
        driver = served.app.engine.drivers[0]
        streams = [asyncio.create_task(stream_tokens(served, tokens_request([*PROMPT, i], 90))) for i in range(3)]
        await until(lambda: driver.totals.num_steps > 20)
        served.fake.gate.clear()
        await served.executors[0].kill()
        await until(lambda: not driver.is_connected)
        served.check_integrity()
        assert not any(stream.done() for stream in streams)
        served.fake.gate.set()
        await served.executors[0].start()
        assert await asyncio.gather(*streams) == [continuation([*PROMPT, i], 90) for i in range(3)]
        served.check_integrity()
        assert (await served.load()).degraded["executor_unavailable"] >= 1


async def test_after_the_timeout_the_request_fails_and_says_how_far_it_came(serve: Serve) -> None:
    async with serve(executor_lost_timeout_s=0.05) as served:
        driver = served.app.engine.drivers[0]
        stream = asyncio.create_task(stream_tokens(served, tokens_request(PROMPT, 90)))
        await until(lambda: any(g.output.num_tokens > 3 for g in driver.generations.values()))
        served.fake.gate.clear()
        generation = next(iter(driver.generations.values()))
        await served.executors[0].kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream
        found = seen(caught.value)
        assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_LOST")
        assert found.infos[0].metadata["generatedTokens"] == str(generation.output.num_tokens)
        assert served.app.engine.num_open_requests == 0


async def test_requests_move_to_the_one_executor_that_is_left(serve: Serve) -> None:
    async with serve(num_executors=2, info={"max_num_seqs": 1}) as served:
        first, second = served.app.engine.drivers
        await until(lambda: first.is_connected and second.is_connected)
        for process in served.executors:
            process.executor.gate.clear()
        streams = [asyncio.create_task(stream_tokens(served, tokens_request([*PROMPT, i], 10))) for i in range(6)]
        await until(lambda: len(first.generations) + len(second.generations) == 6)
        await until(lambda: first.stats().num_running_requests + second.stats().num_running_requests == 2)
        served.executors[1].executor.gate.set()
        await served.executors[0].kill()
        assert await asyncio.gather(*streams) == [continuation([*PROMPT, i], 10) for i in range(6)]
        served.check_integrity()


async def test_requests_that_ran_go_on_elsewhere_with_the_same_tokens(serve: Serve) -> None:
    async with serve(num_executors=2, max_chunk_tokens=8) as served:
        first, second = served.app.engine.drivers
        await until(lambda: first.is_connected and second.is_connected)
        requests = [tokens_request([*PROMPT, i], 60, n=2) for i in range(6)]
        requests[0].stopping.stop_token_ids.append(continuation([*PROMPT, 0], 5)[4])  # its samples end early
        for process in served.executors:
            process.executor.gate.clear()
        streams = [asyncio.create_task(stream_tokens(served, request)) for request in requests]
        await until(lambda: len(first.generations) > 1 and len(second.generations) > 1)
        await until(lambda: first.totals.num_steps > 20, served.fake.gate.let_one_through)
        served.executors[1].executor.gate.set()
        await served.executors[0].kill()
        answers = await asyncio.gather(*streams)
        for i, answer in enumerate(answers):
            expected = continuation([*PROMPT, i], 60)
            assert answer == (expected if i else expected[: expected.index(expected[4]) + 1])
        assert second.totals.num_steps > 0 and not first.generations
        served.check_integrity()


async def test_an_executor_that_owes_a_result_for_too_long_is_lost(serve: Serve) -> None:
    async with serve(num_executors=2, step_timeout_s=0.2) as served:
        first, second = served.app.engine.drivers
        await until(lambda: first.is_connected and second.is_connected)
        served.fake.gate.clear()  # hangs, while its connection is fine
        streams = [asyncio.create_task(stream_tokens(served, tokens_request([*PROMPT, i], 20))) for i in range(4)]
        assert await asyncio.gather(*streams) == [continuation([*PROMPT, i], 20) for i in range(4)]
        assert "no result of a step" in first.problem.message


async def test_an_executor_with_another_model_is_refused(serve: Serve) -> None:
    async with serve(num_executors=2) as served:
        first, second = served.app.engine.drivers
        await until(lambda: first.is_connected and second.is_connected)
        await served.executors[1].kill()
        served.executors[1].executor.info.kv_fingerprint = b"g" * 32
        await served.executors[1].start()
        await until(lambda: served.app.engine.degraded.counts["executor_refused"] > 0)
        assert not second.is_connected
        assert await stream_tokens(served, tokens_request(PROMPT, 5)) == continuation(PROMPT, 5)


async def test_an_executor_that_breaks_the_protocol_costs_its_requests_only(serve: Serve) -> None:
    async with serve() as served:
        driver = served.app.engine.drivers[0]
        await until(lambda: driver.is_connected)
        served.fake.break_next_result = True
        stream = asyncio.create_task(stream_tokens(served, tokens_request(PROMPT, 20)))
        assert await stream == continuation(PROMPT, 20)  # in the next session
        served.check_integrity()
