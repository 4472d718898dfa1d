"""An ExecutorService without a model: the next token is a function of the tokens before it, so any two runs agree.

It keeps what was written where, and checks on every chunk that a sequence's blocks hold that very sequence: a block table
that shares, loses or mixes up blocks fails here. A gate holds steps back, so that tests stand in the phase that they mean.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from common.token_ids import unpack_token_ids
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.executor.v1 import executor_service_pb2_grpc as pb_grpc
from octavo.kvstore.v1 import kv_store_service_pb2 as kvstore_pb
from octavo.kvstore.v1 import kv_store_service_pb2_grpc as kvstore_pb_grpc
from octavo.types.v1 import types_pb2
from tests.unit.scheduler_svc.text.small_tokenizers import BYTE_VOCAB_SIZE

# Ids that are letters and spaces in the byte-level test tokenizer: never the end of text.
NUM_PLAIN_IDS = 90


def next_token(token_ids: Sequence[int]) -> int:
    """What the fake model says after these tokens."""
    return 1 + zlib.crc32(",".join(map(str, token_ids)).encode()) % NUM_PLAIN_IDS


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The output of an undisturbed run."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(next_token(known))
    return known[len(prompt) :]


class Gate:
    """Lets steps through: all of them while it is open, one by one while it is shut."""

    def __init__(self) -> None:
        self._is_open = True
        self._permits = 0
        self._changed = asyncio.Event()

    def set(self) -> None:
        """Opens."""
        self._is_open = True
        self._changed.set()

    def clear(self) -> None:
        """Shuts."""
        self._is_open, self._permits = False, 0

    def let_one_through(self) -> None:
        """The next step, and no more."""
        self._permits = 1
        self._changed.set()

    async def wait(self) -> None:
        """Waits for its turn."""
        while not self._is_open and not self._permits:
            self._changed.clear()
            await self._changed.wait()
        self._permits = 0


@dataclass
class _Sequence:
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    wants_logprobs: bool


@dataclass
class FakeExecutor:
    """One executor process's servicer.

    Attributes:
        gate: steps wait while it is shut.
        stored: blocks of the fake store by key, as token ids.
        fail_token: a sequence fails alone when its last known token is this one; None: never.
        forget_before_load: how many blocks of the next load are still there; None: all.
        break_next_result: the next result carries a wrong step_id.
        complaints: what was wrong with plans, so that a reconnect does not hide it.
        num_steps: how many were computed.
        plans: all of them, oldest first.
    """

    info: pb.ExecutorInfo
    gate: Gate = field(default_factory=Gate)
    stored: dict[bytes, list[int]] = field(default_factory=dict)
    fail_token: int | None = None
    forget_before_load: int | None = None
    break_next_result: bool = False
    complaints: list[str] = field(default_factory=list)
    num_steps: int = 0
    plans: list[pb.StepPlan] = field(default_factory=list)


def fake_info(**changes: Any) -> pb.ExecutorInfo:
    """A small executor."""
    fields: dict[str, Any] = {
        "executor_id": "fake-0", "model": "models/fake", "backend": "fake", "dtype": "float32", "kv_fingerprint": b"f" * 32,
        "num_blocks": 64, "block_size": 4, "block_bytes": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "max_model_len": 128, "vocab_size": BYTE_VOCAB_SIZE,
    }  # fmt: skip
    return pb.ExecutorInfo(**(fields | changes))


class FakeExecutorServicer(pb_grpc.ExecutorServiceServicer):
    """Serves a FakeExecutor; every session starts with empty memory, as a new process would."""

    def __init__(self, executor: FakeExecutor):
        self._executor = executor

    async def RunSession(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RunSessionRequest], context: Any
    ) -> AsyncIterator[pb.RunSessionResponse]:
        """One session."""
        session = _Session(self._executor)
        try:
            async for response in self._answers(session, request_iterator):
                yield response
        except AssertionError as error:
            self._executor.complaints.append(str(error))
            raise

    async def _answers(
        self, session: "_Session", request_iterator: AsyncIterator[pb.RunSessionRequest]
    ) -> AsyncIterator[pb.RunSessionResponse]:
        async for request in request_iterator:
            match request.WhichOneof("command"):
                case "hello":
                    yield pb.RunSessionResponse(ready=self._executor.info)
                case "plan":
                    await self._executor.gate.wait()
                    yield pb.RunSessionResponse(result=session.execute(request.plan))
                case "load_blocks":
                    yield pb.RunSessionResponse(blocks_loaded=session.load(request.load_blocks))
                case "save_blocks":
                    yield pb.RunSessionResponse(blocks_saved=session.save(request.save_blocks))


class _Session:
    def __init__(self, executor: FakeExecutor):
        self._executor = executor
        self._sequences: dict[int, _Sequence] = {}
        self._kv: dict[int, list[int | None]] = {}
        self._last_step_id = 0

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        executor = self._executor
        assert plan.step_id == self._last_step_id + 1, f"step {plan.step_id} after {self._last_step_id}"
        self._last_step_id = plan.step_id
        executor.num_steps += 1
        executor.plans.append(plan)
        for seq_id in plan.dropped_seq_ids:
            self._sequences.pop(seq_id, None)
        for new in plan.new_sequences:
            assert new.seq_id not in self._sequences, f"sequence {new.seq_id} is there already"
            token_ids = unpack_token_ids(new.token_ids).tolist()
            assert new.num_computed_tokens < len(token_ids), f"nothing to compute for sequence {new.seq_id}"
            self._sequences[new.seq_id] = _Sequence(
                token_ids, new.num_computed_tokens, list(new.block_ids), new.sampling.HasField("num_logprobs")
            )
        for copy in plan.block_copies:
            self._kv[copy.destination_block_id] = list(self._block(copy.source_block_id))
        result = pb.StepResult(step_id=plan.step_id, timings=pb.StepTimings(forward_s=0.001))
        for chunk in plan.chunks:
            self._compute(chunk, result)
        if executor.break_next_result:
            executor.break_next_result = False
            result.step_id += 100
        return result

    def _compute(self, chunk: pb.Chunk, result: pb.StepResult) -> None:
        sequence = self._sequences.get(chunk.seq_id)
        if sequence is None:  # it failed in the step before; the plan was sent ahead
            return
        sequence.block_ids += chunk.new_block_ids
        end = sequence.num_computed_tokens + chunk.num_tokens
        assert end <= len(sequence.token_ids), "a chunk beyond the known tokens"
        for position in range(sequence.num_computed_tokens, end):
            block = self._block(sequence.block_ids[position // self._executor.info.block_size])
            block[position % self._executor.info.block_size] = sequence.token_ids[position]
        found = [token_id for block_id in sequence.block_ids for token_id in self._block(block_id)][:end]
        assert found == sequence.token_ids[:end], f"blocks of sequence {chunk.seq_id} hold something else"
        sequence.num_computed_tokens = end
        if end < len(sequence.token_ids):
            return
        if sequence.token_ids[-1] == self._executor.fail_token:
            del self._sequences[chunk.seq_id]
            result.errors.append(pb.SequenceError(seq_id=chunk.seq_id, message="poisoned"))
            return
        token_id = next_token(sequence.token_ids)
        sequence.token_ids.append(token_id)
        sampled = pb.SampledToken(seq_id=chunk.seq_id, token_id=token_id)
        if sequence.wants_logprobs:
            chosen = types_pb2.TokenLogprob(token_id=token_id, logprob=-0.5)
            sampled.logprobs.CopyFrom(types_pb2.PositionLogprobs(chosen=chosen))
        result.sampled.append(sampled)

    def load(self, load: pb.LoadBlocks) -> pb.BlocksLoaded:
        num_loaded = 0
        limit, self._executor.forget_before_load = self._executor.forget_before_load, None
        for key, block_id in zip(load.keys, load.block_ids, strict=True):
            if key not in self._executor.stored or num_loaded == limit:
                break
            self._kv[block_id] = list(self._executor.stored[key])
            num_loaded += 1
        tiers = {"shm": num_loaded} if num_loaded else {}
        reason = "" if num_loaded == len(load.keys) else "miss"
        return pb.BlocksLoaded(load_id=load.load_id, num_loaded=num_loaded, num_by_tier=tiers, seconds=0.001, reason=reason)

    def save(self, save: pb.SaveBlocks) -> pb.BlocksSaved:
        for key, block_id in zip(save.keys, save.block_ids, strict=True):
            content = self._block(block_id)
            assert None not in content, "a block is saved before it is full"
            self._executor.stored[key] = [token_id for token_id in content if token_id is not None]
        return pb.BlocksSaved(save_id=save.save_id, num_written=len(save.keys))

    def _block(self, block_id: int) -> list[int | None]:
        return self._kv.setdefault(block_id, [None] * self._executor.info.block_size)


class FakeStoreServicer(kvstore_pb_grpc.KvStoreServiceServicer):
    """The block store of a FakeExecutor, as far as a scheduler asks."""

    def __init__(self, executor: FakeExecutor):
        self._executor = executor

    async def LookupBlocks(self, request: kvstore_pb.LookupBlocksRequest, context: Any) -> kvstore_pb.LookupBlocksResponse:  # noqa: N802
        """The leading keys that are there."""
        num_found = next((i for i, key in enumerate(request.keys) if key not in self._executor.stored), len(request.keys))
        return kvstore_pb.LookupBlocksResponse(tiers=[kvstore_pb.TIER_SHM] * num_found)

    async def GetStats(self, request: kvstore_pb.GetStatsRequest, context: Any) -> kvstore_pb.GetStatsResponse:  # noqa: N802
        """One tier."""
        tier = kvstore_pb.TierStats(tier=kvstore_pb.TIER_SHM, num_blocks=len(self._executor.stored))
        return kvstore_pb.GetStatsResponse(tiers=[tier])

    async def ClearBlocks(self, request: kvstore_pb.ClearBlocksRequest, context: Any) -> kvstore_pb.ClearBlocksResponse:  # noqa: N802
        """Drops all."""
        num_dropped = len(self._executor.stored)
        self._executor.stored.clear()
        return kvstore_pb.ClearBlocksResponse(num_dropped=num_dropped)


class FakeExecutorProcess:
    """A FakeExecutor and its block store behind a server that can be killed and come back on the same address."""

    def __init__(self, executor: FakeExecutor, target: str):
        self.executor = executor
        self.target = target
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listens."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_ExecutorServiceServicer_to_server(FakeExecutorServicer(self.executor), self._server)  # type: ignore[abstract]
        kvstore_pb_grpc.add_KvStoreServiceServicer_to_server(FakeStoreServicer(self.executor), self._server)  # type: ignore[abstract]
        self._server.add_insecure_port(self.target)
        await self._server.start()

    async def kill(self) -> None:
        """Ends every session at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
