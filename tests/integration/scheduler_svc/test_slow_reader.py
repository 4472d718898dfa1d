"""A reader that stalls holds up nobody, loses nothing, and is put off when it is too far behind."""

import grpc
import grpc.aio
import pytest

from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1 import inference_service_pb2_grpc
from tests.contract.errors import seen
from tests.integration.scheduler_svc.conftest import Serve, stream_tokens, tokens_request, until
from tests.integration.scheduler_svc.fake_executor import continuation

PROMPT = [5, 6, 7, 8]
LARGE = {"max_model_len": 4000, "num_blocks": 8000, "max_num_seqs": 16}
# A small window, so that writes block soon.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


async def test_deltas_are_merged_while_a_reader_stalls_and_nobody_waits_for_it(serve: Serve) -> None:
    async with serve(info=LARGE) as served:
        driver = served.app.engine.drivers[0]
        async with grpc.aio.insecure_channel(served.app.address.target, SMALL_WINDOW) as channel:
            request = tokens_request(PROMPT, 3000, request_id="slow")
            call = inference_service_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(
                pb.StreamGenerateRequest(generation=request)
            )
            await until(lambda: len(driver.generations) == 1)
            assert await stream_tokens(served, tokens_request([1, 2, 3], 50)) == continuation([1, 2, 3], 50)
            await until(lambda: not driver.generations)  # computed to its end, though nobody has read
            messages = [message async for message in call]
            tokens = [token_id for message in messages for delta in message.deltas for token_id in delta.token_ids]
            assert tokens == continuation(PROMPT, 3000)
            assert len(messages) < 3000
            assert max(len(message.deltas[0].token_ids) for message in messages) > 1


async def test_a_reader_too_far_behind_gets_what_was_there_and_a_clear_end(serve: Serve) -> None:
    async with serve(info=LARGE) as served:
        driver = served.app.engine.drivers[0]
        async with grpc.aio.insecure_channel(served.app.address.target, SMALL_WINDOW) as channel:
            request = tokens_request(PROMPT, 3900, n=8)
            call = inference_service_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(
                pb.StreamGenerateRequest(generation=request)
            )
            await until(lambda: len(driver.generations) == 1)
            await until(lambda: not driver.generations)
            tokens: list[int] = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for message in call:
                    for delta in message.deltas:
                        if delta.index == 0:
                            tokens += delta.token_ids
            found = seen(caught.value)
            assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
            assert tokens == continuation(PROMPT, 3900)[: len(tokens)] and len(tokens) > 100
            assert driver.stats().num_used_blocks == 0
            served.check_integrity()
