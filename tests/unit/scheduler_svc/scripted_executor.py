"""An executor that a test plays by hand, and outputs that only remember."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from common.block_hash import root_key
from common.errors import OctavoError
from common.ids import BlockKey, RequestId
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.types.v1.types_pb2 import PositionLogprobs
from scheduler_svc.core.plan import SampleId, SequenceUpdate
from scheduler_svc.core.request import Request, SamplingParams, StopConditions

FINGERPRINT = b"f" * 32


class ScriptedLink:
    """One session: commands pile up, events come from the test."""

    def __init__(self, info: pb.ExecutorInfo):
        self.info = info
        self.commands: list[pb.RunSessionRequest] = []
        self.is_closed = False
        self._events: asyncio.Queue[pb.RunSessionResponse | None] = asyncio.Queue()

    @property
    def plans(self) -> list[pb.StepPlan]:
        return [command.plan for command in self.commands if command.HasField("plan")]

    def send(self, command: pb.RunSessionRequest) -> None:
        self.commands.append(command)

    async def events(self) -> AsyncIterator[pb.RunSessionResponse]:
        while (event := await self._events.get()) is not None:
            yield event

    async def close(self) -> None:
        self.is_closed = True

    async def say(self, event: pb.RunSessionResponse | None) -> None:
        """Sends an event (None: the session ends) and lets the engine deal with it."""
        self._events.put_nowait(event)
        await settle()

    async def answer(self, plan: pb.StepPlan, token_id: int) -> None:
        """A result in which every chunk of the plan drew a token."""
        sampled = [pb.SampledToken(seq_id=chunk.seq_id, token_id=token_id) for chunk in plan.chunks]
        await self.say(pb.RunSessionResponse(result=pb.StepResult(step_id=plan.step_id, sampled=sampled)))


class ScriptedExecutor:
    """Opens ScriptedLinks."""

    def __init__(self, address: str = "scripted", **changes: Any):
        fields: dict[str, Any] = {
            "executor_id": address, "model": "models/scripted", "kv_fingerprint": FINGERPRINT, "num_blocks": 32, "block_size": 4,
            "block_bytes": 100, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "vocab_size": 100,
        }  # fmt: skip
        self.address = address
        self.info = pb.ExecutorInfo(**(fields | changes))
        self.links: list[ScriptedLink] = []
        self.hellos: list[pb.Hello] = []
        self.problem: OctavoError | None = None

    async def connect(self, hello: pb.Hello) -> ScriptedLink:
        if self.problem is not None:
            raise self.problem
        self.hellos.append(hello)
        self.links.append(ScriptedLink(self.info))
        return self.links[-1]


class RecordedOutput:
    """Keeps the updates; ends when all samples have."""

    def __init__(self, n: int = 1, *, end_after: int | None = None):
        self.updates: list[SequenceUpdate] = []
        self.error: OctavoError | None = None
        self._n = n
        self._end_after = end_after
        self._ended: set[int] = set()

    @property
    def token_ids(self) -> list[int]:
        return [token_id for update in self.updates for token_id in update.token_ids]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self._ended) == self._n

    def has_ended(self, index: int) -> bool:
        return index in self._ended

    def push(self, update: SequenceUpdate, logprobs: Sequence[PositionLogprobs]) -> None:
        self.updates.append(update)
        mine = sum(len(u.token_ids) for u in self.updates if u.index == update.index)
        if update.finish_reason is not None or mine == self._end_after:  # as if a stop string had been found
            self._ended.add(update.index)

    def push_token(self, sample: SampleId, token_id: int) -> bool:
        self.push(SequenceUpdate(sample.request_id, sample.seq_id, sample.index, (token_id,)), [])
        return self.is_over or self.has_ended(sample.index)

    def fail(self, error: OctavoError) -> None:
        if not self.is_over:
            self.error = error


class ScriptedStore:
    """A block store whose answers the test holds back."""

    def __init__(self, tiers: Sequence[str] = ()):
        self.connected = True
        self.reason = ""
        self.tiers = list(tiers)
        self.asked: list[list[BlockKey]] = []
        self.used: list[list[BlockKey]] = []
        self.prefetched: list[list[BlockKey]] = []
        self.num_ended_prefetches = 0
        self.may_come = asyncio.Event()
        self.may_come.set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def lookup(self, keys: Sequence[BlockKey], timeout_s: float, wait_s: float) -> list[str]:
        self.asked.append(list(keys))
        await self.may_answer.wait()
        return self.tiers[: len(keys)]

    async def note_use(self, keys: Sequence[BlockKey]) -> None:
        self.used.append(list(keys))

    async def prefetch(self, keys: Sequence[BlockKey], fingerprint: bytes, block_bytes: int) -> AsyncIterator[str]:
        self.prefetched.append(list(keys))
        try:
            for tier in self.tiers[-len(keys) :]:
                await self.may_come.wait()
                yield tier
        finally:
            self.num_ended_prefetches += 1


def make_request(name: str = "r", prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 8, **changes: Any) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(),
        stop=StopConditions(max_tokens),
        root_key=root_key(FINGERPRINT),
        arrival_s=0.0,
        **changes,
    )


async def settle() -> None:
    """Lets everything that can run now run."""
    for _ in range(20):
        await asyncio.sleep(0)
