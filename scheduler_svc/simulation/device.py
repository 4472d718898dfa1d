"""An executor that computes nothing: its steps take as long as a profile says, in the time of the loop it runs in.

Speaks the session's protocol to the production driver. Knows how many tokens of a sequence are known and computed; no block
and no policy.
"""

import asyncio
import random
from collections.abc import AsyncIterator

from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc.core.step_time import StepWork
from scheduler_svc.simulation.profile import DeviceProfile
from scheduler_svc.simulation.virtual_time import VirtualTimeLoop

_DRAWN_TOKEN = 7
_BYTES_PER_TOKEN = 4


class SimulatedExecutor:
    """See the module's first lines; an ExecutorConnector.

    Args:
        index: of it among the executors.
        seed: of the times of steps.
    """

    def __init__(self, profile: DeviceProfile, index: int, seed: int):
        self.address = f"simulated-{index}"
        self.busy_s = 0.0
        self._profile = profile
        self._step_times = profile.step_times()
        self._rng = random.Random(f"{seed} {index}")
        self._info = pb.ExecutorInfo(
            executor_id=self.address, model="models/simulated", backend="simulated", dtype="none", kv_fingerprint=b"s" * 32,
            num_blocks=profile.num_blocks, block_size=profile.block_size, block_bytes=1, max_num_seqs=profile.max_num_seqs,
            max_num_batched_tokens=profile.max_num_batched_tokens, max_model_len=1 << 20, vocab_size=1 << 31,
        )  # fmt: skip

    async def connect(self, hello: pb.Hello) -> "SimulatedLink":
        """See ExecutorConnector."""
        return SimulatedLink(self._info, self, self._profile)

    def step_s(self, work: StepWork) -> float:
        """How long a step takes."""
        seconds = max(1e-6, self._step_times.predict_s(work)) * self._rng.choice(self._profile.ratios_of(work))
        self.busy_s += seconds
        return seconds

    def hitch_s(self) -> float:
        """How long it hesitates before a step."""
        return self._rng.choice(self._profile.hitches_s)


class SimulatedLink:
    """A session with a SimulatedExecutor."""

    def __init__(self, info: pb.ExecutorInfo, executor: SimulatedExecutor, profile: DeviceProfile):
        self.info = info
        self._executor = executor
        self._profile = profile
        self._one_way_s = profile.round_trip_s / 2
        self._known: dict[int, int] = {}
        self._computed: dict[int, int] = {}
        self._free_at_s = 0.0
        self._results: asyncio.Queue[pb.StepResult] = asyncio.Queue()

    def send(self, command: pb.RunSessionRequest) -> None:
        """See ExecutorLink. The step's result comes when the steps before it and itself have had their time."""
        loop = asyncio.get_running_loop()
        result = pb.StepResult(step_id=command.plan.step_id)
        seconds = self._executor.step_s(self._execute(command.plan, result))
        start_s = max(loop.time() + self._one_way_s, self._free_at_s) + self._executor.hitch_s()
        result.timings.idle_s = start_s - self._free_at_s
        result.timings.forward_s = seconds
        end_s = start_s + seconds
        self._free_at_s = end_s + self._profile.between_steps_s
        loop.call_at(end_s + self._one_way_s, self._results.put_nowait, result)

    async def events(self) -> AsyncIterator[pb.RunSessionResponse]:
        """See ExecutorLink."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop), "time has to be virtual"
        while True:
            result = await self._results.get()
            yield pb.RunSessionResponse(result=result)
            loop.spend(self._profile.host_step_s + self._profile.host_token_s * len(result.sampled))

    async def close(self) -> None:
        """See ExecutorLink."""

    def _execute(self, plan: pb.StepPlan, result: pb.StepResult) -> StepWork:
        """Draws a token for every sequence that is at its end.

        Returns:
            What a device would have had to compute.
        """
        for seq_id in plan.dropped_seq_ids:
            self._known.pop(seq_id, None)
        for new in plan.new_sequences:
            self._known[new.seq_id] = len(new.token_ids) // _BYTES_PER_TOKEN
            self._computed[new.seq_id] = new.num_computed_tokens
        num_prefill = num_attended = num_decodes = num_context = 0
        for chunk in plan.chunks:
            if chunk.seq_id not in self._known:
                continue
            begin, num_tokens = self._computed[chunk.seq_id], chunk.num_tokens
            end = self._computed[chunk.seq_id] = begin + num_tokens
            if num_tokens == 1:
                num_decodes += 1
                num_context += end
            else:
                num_prefill += num_tokens
                num_attended += num_tokens * begin + num_tokens * (num_tokens + 1) // 2
            if end == self._known[chunk.seq_id]:
                result.sampled.append(pb.SampledToken(seq_id=chunk.seq_id, token_id=_DRAWN_TOKEN))
                self._known[chunk.seq_id] += 1
        return StepWork(num_prefill, num_attended, num_decodes, num_context)
