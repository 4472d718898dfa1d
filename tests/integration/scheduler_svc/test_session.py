"""GenerateSession: many requests on one stream, errors in band."""

from collections import defaultdict

import grpc
import grpc.aio
import pytest

from octavo.scheduler.v1 import inference_service_pb2 as pb
from tests.integration.scheduler_svc.conftest import Serve, tokens_request, until
from tests.integration.scheduler_svc.fake_executor import continuation

PROMPT = [5, 6, 7, 8]


def generation(request_id: str, max_tokens: int = 10, **fields: object) -> pb.GenerateSessionRequest:
    return pb.GenerateSessionRequest(generation=tokens_request(PROMPT, max_tokens, request_id=request_id, **fields))


async def test_requests_of_a_session_answer_side_by_side_and_errors_stay_in_band(serve: Serve) -> None:
    async with serve() as served:
        call = served.inference.GenerateSession()
        for i in range(5):
            await call.write(generation(f"good-{i}", 10 + i))
        await call.write(generation("bad", n=65))
        await call.write(generation(""))
        await call.write(pb.GenerateSessionRequest())
        await call.done_writing()
        tokens: dict[str, list[int]] = defaultdict(list)
        errors = {}
        last = set()
        async for message in call:
            if message.WhichOneof("event") == "error":
                errors[message.error.request_id, message.error.metadata["field"]] = message.error
                continue
            for delta in message.response.deltas:
                tokens[message.response.request_id] += delta.token_ids
            if message.response.HasField("timing"):
                last.add(message.response.request_id)
        assert tokens == {f"good-{i}": continuation(PROMPT, 10 + i) for i in range(5)}
        assert last == set(tokens)
        assert set(errors) == {("bad", "n"), ("", "generation.request_id"), ("", "command")}
        assert all((e.code, e.reason) == (3, "INVALID_PARAMETER") for e in errors.values())


async def test_a_session_cancels_its_own_requests_only(serve: Serve) -> None:
    async with serve() as served:
        served.fake.gate.clear()
        other = served.inference.Generate(tokens_request(PROMPT, 20, request_id="other"))
        call = served.inference.GenerateSession()
        await call.write(generation("mine", 50))
        await until(lambda: served.app.engine.num_open_requests == 2)
        await call.write(pb.GenerateSessionRequest(cancel_request_id="other"))
        await call.write(pb.GenerateSessionRequest(cancel_request_id="mine"))
        message = await call.read()
        assert (message.error.request_id, message.error.code, message.error.reason) == ("mine", 1, "CANCELLED_BY_REQUEST")
        assert served.app.engine.num_open_requests == 1
        await call.write(generation("mine", 5))  # the id is free again
        served.fake.gate.set()
        found: list[int] = []
        while len(found) < 5:
            found += (await call.read()).response.deltas[0].token_ids
        assert found == continuation(PROMPT, 5)
        await call.done_writing()
        assert (await other).usage.completion_tokens == 20


async def test_an_id_in_use_is_refused_in_band(serve: Serve) -> None:
    async with serve() as served:
        served.fake.gate.clear()
        call = served.inference.GenerateSession()
        await call.write(generation("twice"))
        await call.write(generation("twice"))
        message = await call.read()
        assert (message.error.request_id, message.error.reason) == ("twice", "REQUEST_ID_IN_USE")
        call.cancel()


@pytest.mark.parametrize("how", ["cancel", "half close after cancel"])
async def test_the_end_of_a_session_ends_its_requests(serve: Serve, how: str) -> None:
    async with serve() as served:
        served.fake.gate.clear()
        call = served.inference.GenerateSession()
        for i in range(4):
            await call.write(generation(f"request-{i}", 100))
        await until(lambda: served.app.engine.num_open_requests == 4)
        if how == "cancel":
            call.cancel()
        else:
            for i in range(4):
                await call.write(pb.GenerateSessionRequest(cancel_request_id=f"request-{i}"))
            await call.done_writing()
            assert sorted([message.error.request_id async for message in call]) == [f"request-{i}" for i in range(4)]
            assert await call.code() is grpc.StatusCode.OK
        await until(lambda: served.app.engine.num_open_requests == 0)
        served.check_integrity()
