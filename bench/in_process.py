"""The same engine called in one process: scheduler core and executor in one loop, no gRPC, no text, no store.

    python -m bench.in_process        commands on standard input, answers on standard output, one JSON object a line

First the executor's settings, then {"command": "run", "items": [[token_ids, num_output_tokens, arrival_s], ...]}, "flush",
"counters", or "profile" with items and num_steps. What separate processes cost is the difference to this. Started as a process
of its own, with the environment of a worker; bench.serving.InProcess is the other end.
"""

import gc
import itertools
import json
import os
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench.client import Answer
from bench.counters import Counters
from scheduler_svc.core.prefill_budget import InProportion
from scheduler_svc.core.step_time import StepTimeModel

if TYPE_CHECKING:  # torch takes seconds to import, and whoever only starts the child needs none of it
    from executor_svc.inprocess import InProcessExecutor
    from octavo.executor.v1.executor_service_pb2 import StepResult
    from scheduler_svc.core.plan import SequenceUpdate, StepPlan
    from scheduler_svc.core.request import Request
    from scheduler_svc.core.scheduler import Scheduler

_RUN_AHEAD = 3
"""Without a GPU nothing is gained by it."""
Item = tuple[Sequence[int], int, float]


class EngineLoop:
    """A scheduler core and an executor, driven together.

    Args:
        executor: carries the plans out.
        run_ahead: plans that are sent before their results are waited for.
        clock: seconds.

    Attributes:
        counters: sums so far.
    """

    def __init__(self, executor: "InProcessExecutor", run_ahead: int, clock: Callable[[], float] = time.monotonic):
        self._executor = executor
        self._run_ahead = run_ahead
        self._clock = clock
        self._numbers = itertools.count()
        self._results: queue.SimpleQueue[StepResult | Exception] = queue.SimpleQueue()
        self.counters = Counters()
        self._step_times = StepTimeModel()
        self._scheduler = self._new_scheduler()

    def flush(self) -> None:
        """Forgets everything, as after a start."""
        self._executor.reset()
        self._scheduler = self._new_scheduler()

    def run(self, items: Sequence[Item], on_step: Callable[[int], None] = lambda num_unfinished: None) -> list[Answer]:
        """Runs items to their end.

        Args:
            items: token ids, number of output tokens and arrival.
            on_step: called after every step with the number of requests that wait for their first token.
        """
        answers = [Answer(sent_s=arrival_s) for _, _, arrival_s in items]
        waiting = deque(sorted(range(len(items)), key=lambda i: items[i][2]))
        indices: dict[str, int] = {}
        num_starting = len(items)
        outstanding: deque[StepPlan] = deque()
        start_s = self._clock()
        while True:
            now = self._clock() - start_s
            while waiting and items[waiting[0]][2] <= now:
                request = self._request(items[waiting[0]])
                indices[request.request_id] = waiting.popleft()
                self._scheduler.add(request)
            while len(outstanding) < self._run_ahead and (plan := self._scheduler.schedule(self._clock())) is not None:
                self._submit(plan)
                outstanding.append(plan)
            if not outstanding:
                if not waiting:
                    return answers
                time.sleep(max(0.0, items[waiting[0]][2] - (self._clock() - start_s)))
                continue
            updates = self._collect(outstanding.popleft())
            now = self._clock() - start_s
            for update in updates:
                answer = answers[indices[update.request_id]]
                if update.token_ids:
                    num_starting -= answer.num_tokens == 0
                    answer.first_s = answer.first_s or now
                    answer.last_s = now
                    answer.num_tokens += len(update.token_ids)
            on_step(num_starting)

    def _submit(self, plan: "StepPlan") -> None:
        from scheduler_svc import convert

        self._executor.submit(convert.plan_command(plan, plan.step_id).plan, self._results.put)

    def _collect(self, plan: "StepPlan") -> "Iterable[SequenceUpdate]":
        """Waits for the result of a step and applies it."""
        from scheduler_svc import convert

        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        timings = result.timings
        self.counters.num_steps += 1
        step_s = timings.prepare_s + timings.forward_s + timings.sample_s
        self.counters.busy_s += step_s
        self._step_times.learn(plan.work, step_s)
        return self._scheduler.apply(plan.step_id, convert.sampled_tokens(result), convert.sequence_errors(result))

    def _new_scheduler(self) -> "Scheduler":
        from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig

        info = self._executor.info
        config = SchedulerConfig(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_chunk_tokens=info.max_num_batched_tokens,
        )
        return Scheduler(config, InProportion(self._step_times, config.max_num_batched_tokens))

    def _request(self, item: Item) -> "Request":
        from common.block_hash import root_key
        from common.ids import RequestId
        from scheduler_svc.core.request import Request, SamplingParams, StopConditions

        return Request(
            request_id=RequestId(str(next(self._numbers))),
            prompt_token_ids=tuple(item[0]),
            sampling=SamplingParams(temperature=0.0),
            stop=StopConditions(max_tokens=item[1]),
            root_key=root_key(self._executor.info.kv_fingerprint),
            arrival_s=self._clock(),
        )


def _busy_share(loop: EngineLoop, items: Sequence[Item], num_steps: int) -> float:
    """Share of the time in which a kernel ran, over num_steps steps after every request has begun to decode."""
    import torch

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    num_decoded = 0

    def on_step(num_starting: int) -> None:
        nonlocal num_decoded
        num_decoded += num_starting == 0
        if num_starting == 0 and num_decoded == 10:
            profiler.start()
        if num_starting == 0 and num_decoded == 10 + num_steps:
            profiler.stop()

    loop.run(items, on_step)
    events: Any = profiler.events()  # type: ignore[no-untyped-call]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA")
    return covered_share(spans)


def covered_share(spans: Sequence[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end that is inside of a span; spans are in order of their start."""
    covered, end = 0.0, spans[0][0]
    for start, stop in spans:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered / (end - spans[0][0])


def main() -> None:
    """Serves commands until standard input ends."""
    settings_line = sys.stdin.readline()
    from executor_svc.inprocess import InProcessExecutor
    from executor_svc.settings import ExecutorSettings

    # Only replies may reach the real standard output.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        settings = ExecutorSettings.from_json(settings_line.encode())
        executor = InProcessExecutor.from_settings(settings, lambda text: print(text, file=sys.stderr))
        loop = EngineLoop(executor, 1 if settings.device == "cpu" else _RUN_AHEAD)
        gc.collect()
        gc.freeze()  # as the worker does
        reply({})
        while line := sys.stdin.readline():
            command = json.loads(line)
            match command["command"]:
                case "flush":
                    loop.flush()
                    reply({})
                case "run":
                    reply({"answers": [asdict(answer) for answer in loop.run(command["items"])]})
                case "counters":
                    reply(asdict(loop.counters))
                case "profile":
                    reply({"busy_share": _busy_share(loop, command["items"], command["num_steps"])})
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
