"""An executor that computes nothing: every step takes as long as it is told and draws made-up tokens. For measuring the rest.

    python -m bench.scripted_executor unix:/path STEP_MS NUM_SEQS VOCAB_SIZE

Speaks the session's protocol, with a line as a real executor has one. Knows how many tokens of a sequence are known and
computed; nothing of blocks.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from common.frames import Frame, FrameKind, read_frame
from common.shm.host import host_id
from common.token_ids import unpack_token_ids
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.executor.v1 import executor_service_pb2_grpc as pb_grpc

_FIRST_TOKEN = 32


class Sequences:
    """How far each sequence is."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._computed: dict[int, int] = {}

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        """The result of a step: a token for every sequence that is at its end."""
        for seq_id in plan.dropped_seq_ids:
            self._known.pop(seq_id, None)
        for new in plan.new_sequences:
            self._known[new.seq_id] = len(unpack_token_ids(new.token_ids))
            self._computed[new.seq_id] = new.num_computed_tokens
        result = pb.StepResult(step_id=plan.step_id)
        for chunk in plan.chunks:
            if chunk.seq_id not in self._known:
                continue
            self._computed[chunk.seq_id] += chunk.num_tokens
            if self._computed[chunk.seq_id] == self._known[chunk.seq_id]:
                token_id = _FIRST_TOKEN + self._known[chunk.seq_id] % 64
                result.sampled.append(pb.SampledToken(seq_id=chunk.seq_id, token_id=token_id))
                self._known[chunk.seq_id] += 1
        return result


class ScriptedExecutor(pb_grpc.ExecutorServiceServicer):
    """See the module's first lines.

    Args:
        info: what it says it is.
        step_s: how long every step takes.
        line_path: of the socket that it offers.
    """

    def __init__(self, info: pb.ExecutorInfo, step_s: float, line_path: str):
        self._info = info
        self._step_s = step_s
        self._line_path = line_path

    async def RunSession(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RunSessionRequest], context: Any
    ) -> AsyncIterator[pb.RunSessionResponse]:
        """Opens a session; plans come by the line."""
        async for request in request_iterator:
            if request.HasField("hello"):
                line = pb.LocalLine(host_id=host_id(), socket_path=self._line_path)
                yield pb.RunSessionResponse(ready=self._info, line=line)

    async def GetExecutorInfo(self, request: pb.GetExecutorInfoRequest, context: Any) -> pb.GetExecutorInfoResponse:  # noqa: N802
        """What it says it is."""
        return pb.GetExecutorInfoResponse(info=self._info)

    async def serve_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries out plans, one after the other, step_s each."""
        writer.write(Frame(FrameKind.OPENED, 1).encode())
        sequences = Sequences()
        loop = asyncio.get_running_loop()
        free_at_s = loop.time()
        with contextlib.closing(writer):
            while (frame := await read_frame(reader)) is not None:
                plan = pb.RunSessionRequest.FromString(frame.payload).plan
                idle_s = max(0.0, loop.time() - free_at_s)
                free_at_s = max(loop.time(), free_at_s) + self._step_s
                result = sequences.execute(plan)
                await asyncio.sleep(free_at_s - loop.time())
                result.timings.forward_s, result.timings.idle_s = self._step_s, idle_s
                event = pb.RunSessionResponse(result=result)
                writer.write(Frame(FrameKind.EVENT, 1, event.SerializeToString()).encode())


async def serve(target: str, step_s: float, num_seqs: int, vocab_size: int) -> None:
    """Serves until it is killed."""
    info = pb.ExecutorInfo(
        executor_id="scripted", model="models/scripted", backend="scripted", dtype="none", kv_fingerprint=b"s" * 32,
        num_blocks=num_seqs * 256, block_size=16, block_bytes=1024, max_num_seqs=num_seqs, max_num_batched_tokens=8192,
        max_model_len=4096, vocab_size=vocab_size,
    )  # fmt: skip
    line_path = f"{target.removeprefix('unix:')}.line"
    executor = ScriptedExecutor(info, step_s, line_path)
    lines = await asyncio.start_unix_server(executor.serve_line, line_path, limit=1 << 22)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_ExecutorServiceServicer_to_server(executor, server)
    server.add_insecure_port(target)
    await server.start()
    async with lines:
        await lines.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2]) / 1e3, int(sys.argv[3]), int(sys.argv[4])))
