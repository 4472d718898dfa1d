"""A client that goes away in whatever phase frees its blocks within a step and changes nobody else's tokens."""

import asyncio

import grpc
import grpc.aio
import pytest

from common.ids import RequestId
from octavo.scheduler.v1 import inference_service_pb2 as pb
from tests.integration.scheduler_svc.conftest import Serve, stream_tokens, tokens_request, until
from tests.integration.scheduler_svc.fake_executor import continuation

BYSTANDER = [50, 51, 52, 53]
VICTIM = list(range(1, 41))


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "channel closed"])
async def test_client_goes_away(serve: Serve, phase: str, how: str) -> None:
    seats = 1 if phase == "queued" else 8
    async with serve(info={"max_num_seqs": seats}, max_chunk_tokens=4, prefix_caching=False) as served:
        driver = served.app.engine.drivers[0]
        served.fake.gate.clear()
        bystander = asyncio.create_task(stream_tokens(served, tokens_request(BYSTANDER, 60)))
        await until(lambda: driver.stats().num_running_requests == 1)
        async with grpc.aio.insecure_channel(served.app.address.target) as channel:
            method = "/octavo.scheduler.v1.InferenceService/StreamGenerate"
            call = channel.unary_stream(
                method,
                request_serializer=pb.StreamGenerateRequest.SerializeToString,
                response_deserializer=pb.StreamGenerateResponse.FromString,
            )(
                pb.StreamGenerateRequest(generation=tokens_request(VICTIM, 60, request_id="victim")),
                timeout=2.0 if how == "deadline" else None,
            )
            reader = asyncio.create_task(call.read())
            await until(lambda: len(driver.generations) == 2)
            victim = driver.generations[RequestId("victim")]
            if phase != "queued":
                await until(lambda: driver.stats().num_running_requests == 2, served.fake.gate.let_one_through)
            if phase == "decode":
                await until(lambda: victim.output.num_tokens > 2, served.fake.gate.let_one_through)
            match how:
                case "cancel":
                    call.cancel()
                case "channel closed":
                    await channel.close()
            await until(lambda: served.app.engine.num_open_requests == 1)
            served.check_integrity()
            stats = driver.stats()
            # The victim's blocks are free though no step has ended since.
            bystander_blocks = -(-(len(BYSTANDER) + 60) // 4)
            assert stats.num_used_blocks <= bystander_blocks
            assert (stats.num_running_requests, stats.num_waiting_requests) == (1, 0)
            await asyncio.gather(reader, return_exceptions=True)
        served.fake.gate.set()
        assert await bystander == continuation(BYSTANDER, 60)
        await until(lambda: driver.stats().num_used_blocks == 0)
        served.check_integrity()
        load = await served.load()
        assert (load.num_cancelled_requests, load.num_finished_requests) == (1, 1)


async def test_a_unary_call_that_is_cancelled_is_forgotten(serve: Serve) -> None:
    async with serve() as served:
        served.fake.gate.clear()
        call = served.inference.Generate(tokens_request(VICTIM, 60))
        await until(lambda: served.app.engine.num_open_requests == 1)
        call.cancel()
        await until(lambda: served.app.engine.num_open_requests == 0)
        assert served.app.engine.drivers[0].stats().num_used_blocks == 0


async def test_a_reader_that_never_reads_and_leaves_is_forgotten(serve: Serve) -> None:
    async with serve(info={"max_model_len": 3000, "num_blocks": 1000}) as served:
        request = tokens_request([1, 2], 2900, n=4)
        call = served.inference.StreamGenerate(pb.StreamGenerateRequest(generation=request))
        await until(lambda: any(g.output.num_tokens > 2000 for g in served.app.engine.drivers[0].generations.values()))
        call.cancel()
        await until(lambda: served.app.engine.num_open_requests == 0)
        served.check_integrity()
