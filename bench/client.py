"""One client process of a benchmark: streams of the public API, their times taken where a user would take them.

    python -m bench.client        commands on standard input, answers on standard output, one JSON object a line

{"target", "timeout_s", "items": [[token_ids, num_output_tokens, arrival_s], ...]} is answered by {"ready": true} once the
channel is up and every request is made; {"start_at_s": t}, on the system's monotonic clock, by {"answers", "cpu_s"} at the end.
Instead of items there can be "conversations", lists of every turn's new token ids, with "num_in_flight" and "num_output_tokens".
Knows gRPC and the public protos; knows no workload and no figure. Several of these share the load, so that none is the limit.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc.aio

from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1 import inference_service_pb2_grpc as pb_grpc
from octavo.scheduler.v1 import model_service_pb2, model_service_pb2_grpc
from octavo.types.v1 import types_pb2

_OPTIONS = (("grpc.max_receive_message_length", 64 << 20),)
_WARM_UP_CALLS = 3


@dataclass
class Answer:
    """What came back of one request. Times are seconds from the start of the workload.

    Attributes:
        sent_s: when it was sent.
        first_s, last_s: when its first and last token were here.
        num_tokens: output tokens.
        num_cached: prompt tokens whose KV was there already.
        num_messages: messages with tokens.
        error: status and details; empty: none.
    """

    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    num_cached: int = 0
    num_messages: int = 0
    error: str = ""


def request_message(token_ids: Sequence[int], num_output_tokens: int) -> pb.StreamGenerateRequest:
    """A request for exactly so many greedy tokens, as ids."""
    return pb.StreamGenerateRequest(
        generation=pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=token_ids),
            sampling=types_pb2.SamplingParams(temperature=0.0),
            stopping=pb.StoppingCriteria(max_tokens=num_output_tokens, ignore_eos=True),
            output=pb.OutputOptions(return_token_ids=True),
        )
    )


async def _stream(
    stub: "pb_grpc.InferenceServiceAsyncStub",
    request: pb.StreamGenerateRequest,
    start_at_s: float,
    arrival_s: float,
    end_at_s: float,
    token_ids: list[int] | None = None,
) -> Answer:
    """One request from its sending to its end; an error is part of the answer. The output goes to token_ids."""
    answer = Answer()
    if (wait_s := start_at_s + arrival_s - time.monotonic()) > 0:
        await asyncio.sleep(wait_s)
    answer.sent_s = time.monotonic() - start_at_s
    try:
        async for response in stub.StreamGenerate(request, timeout=max(0.001, end_at_s - time.monotonic())):
            if num_tokens := sum(len(delta.token_ids) for delta in response.deltas):
                answer.last_s = time.monotonic() - start_at_s
                answer.first_s = answer.first_s or answer.last_s
                answer.num_tokens += num_tokens
                answer.num_messages += 1
                if token_ids is not None:
                    token_ids += [token_id for delta in response.deltas for token_id in delta.token_ids]
            answer.num_cached = response.usage.cached_tokens
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"
        return answer
    wanted = request.generation.stopping.max_tokens
    if answer.num_tokens != wanted:
        answer.error = f"{answer.num_tokens} tokens came, {wanted} were asked for"
    return answer


async def _converse(
    stub: "pb_grpc.InferenceServiceAsyncStub", command: dict[str, Any], start_at_s: float, end_at_s: float
) -> list[Answer]:
    """All turns of all conversations, so many in flight; answers in order of turns, in each turn of conversations."""
    conversations: list[list[list[int]]] = command["conversations"]
    num_turns, num_output = len(conversations[0]), command["num_output_tokens"]
    said: list[list[int]] = [[] for _ in conversations]
    idle = [asyncio.Lock() for _ in conversations]
    places = asyncio.Semaphore(command["num_in_flight"])

    async def answer(turn: int, user: int) -> Answer:
        try:
            async with idle[user]:
                said[user] += conversations[user][turn]
                request = request_message(said[user], num_output)
                return await _stream(stub, request, start_at_s, 0.0, end_at_s, said[user])
        finally:
            places.release()

    tasks = []
    for turn in range(num_turns):
        for user in range(len(conversations)):
            await places.acquire()
            tasks.append(asyncio.create_task(answer(turn, user)))
    return await asyncio.gather(*tasks)


class Client:
    """Answers commands. Its loop and its channels live on from one to the next, as those of a user's program do."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def serve(self) -> None:
        """Returns when standard input ends."""
        while line := await _readline():
            _reply(await self._run(json.loads(line)))

    async def _run(self, command: dict[str, Any]) -> dict[str, Any]:
        """All requests of one command."""
        requests = [
            (request_message(token_ids, num_output), arrival_s) for token_ids, num_output, arrival_s in command.get("items", ())
        ]
        channel = self._channels.get(command["target"])
        if channel is None:
            channel = self._channels[command["target"]] = grpc.aio.insecure_channel(command["target"], options=_OPTIONS)
        stub: pb_grpc.InferenceServiceAsyncStub = pb_grpc.InferenceServiceStub(channel)
        models: model_service_pb2_grpc.ModelServiceAsyncStub = model_service_pb2_grpc.ModelServiceStub(channel)
        for _ in range(_WARM_UP_CALLS):
            await models.ListModels(model_service_pb2.ListModelsRequest(), timeout=command["timeout_s"], wait_for_ready=True)
        gc.collect()
        _reply({"ready": True})
        start_at_s = json.loads(await _readline())["start_at_s"]
        end_at_s = start_at_s + command["timeout_s"]
        cpu_s = time.process_time()
        if "conversations" in command:
            answers = await _converse(stub, command, start_at_s, end_at_s)
        else:
            streams = (_stream(stub, request, start_at_s, arrival_s, end_at_s) for request, arrival_s in requests)
            answers = await asyncio.gather(*streams)
        return {"answers": [asdict(answer) for answer in answers], "cpu_s": time.process_time() - cpu_s}


async def _readline() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


def _reply(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    """Serves commands until standard input ends."""
    asyncio.run(Client().serve())


if __name__ == "__main__":
    main()
