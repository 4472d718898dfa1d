"""A recorded core, run again, decides the same, whatever happened to it; a core that decides otherwise is found out."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.degraded import DegradedPaths
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.policies.choice import POLICIES
from scheduler_svc.core.prefill_budget import WholeSteps
from scheduler_svc.core.run_ahead import RunAhead
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_time import StepWork
from scheduler_svc.recording.core import RecordedRunAhead, RecordedScheduler
from scheduler_svc.recording.reader import RecordingFile
from scheduler_svc.recording.recorder import Recorder, RecorderLimits, Recording
from scheduler_svc.recording.replay import Replay
from tests.unit.scheduler_svc.core.rig import make_config
from tests.unit.scheduler_svc.core.test_scheduler_random import RandomDriver


def whole_steps(config: SchedulerConfig, run_ahead: RunAhead, policy: str) -> Scheduler:
    return Scheduler(config, WholeSteps(), POLICIES[policy](config.tenants))


def recorded_scheduler(recording: Recording, config: SchedulerConfig, policy: str = "fair") -> RecordedScheduler:
    recording.note(recording.encode.start, config, 4, policy, ("models/m", "cpu", "float32"))
    return RecordedScheduler(recording, config, WholeSteps(), POLICIES[policy](config.tenants))


def record_random_life(
    folder: Path, config: SchedulerConfig, seed: int, num_steps: int, *, run_ahead: int = 2, policy: str = "fair"
) -> RecordingFile:
    """Everything that can happen to a scheduler, many times."""
    recorder = Recorder(folder, DegradedPaths(), RecorderLimits(segment_bytes=1 << 16))
    recording = recorder.recording("unix:/tmp/executor-0.sock")
    driver = RandomDriver(config, random.Random(seed), run_ahead)
    driver.rig.scheduler = recorded_scheduler(recording, config, policy)
    for _ in range(num_steps):
        driver.step()
    driver.rig.executor.failing.clear()
    driver.rig.wind_up(run_ahead)
    recorder.close()
    return RecordingFile.of(next(iter(sorted(folder.glob("*.0000.octrec")))))


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(11, 60),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    max_num_batched_tokens=st.sampled_from([2, 7, 64]),
    run_ahead=st.integers(0, 2),
    prefix_caching=st.booleans(),
    policy=st.sampled_from(sorted(POLICIES)),
)
@settings(max_examples=25)
def test_no_decision_differs_under_any_limits(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    num_blocks: int,
    block_size: int,
    max_num_batched_tokens: int,
    run_ahead: int,
    prefix_caching: bool,
    policy: str,
) -> None:
    config = make_config(
        num_blocks=max(num_blocks, -(-60 // block_size)), block_size=block_size, max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=prefix_caching, save_blocks=True, max_waiting_requests=12,
    )  # fmt: skip
    file = record_random_life(tmp_path_factory.mktemp("rec"), config, seed, 350, run_ahead=run_ahead, policy=policy)
    replay = Replay(whole_steps)
    for call in file.calls():
        replay.take(call)

    figures = replay.end()
    assert figures.differences == []
    assert figures.num_decisions > 50
    assert figures.over == ""


def test_no_decision_of_a_long_life_differs_over_several_files(tmp_path: Path) -> None:
    config = make_config(num_blocks=19, max_num_seqs=6, max_num_batched_tokens=24, max_waiting_requests=12, save_blocks=True)
    file = record_random_life(tmp_path, config, 5, 20_000)
    replay = Replay(whole_steps)
    for call in file.calls():
        replay.take(call)

    figures = replay.end()
    assert figures.num_differences == 0
    assert len(file.segments) >= 2
    assert figures.num_preemptions > 50
    assert figures.num_cancelled > 50
    assert figures.num_losses > 3


class SkipsSomeSteps(Scheduler):
    """A core that is another one in a small thing: every 50th step is left out."""

    def schedule(self, now_s: float) -> StepPlan | None:
        return None if int(now_s) % 50 == 0 else super().schedule(now_s)


def test_a_core_that_decides_otherwise_is_found_out(tmp_path: Path) -> None:
    file = record_random_life(tmp_path, make_config(), 3, 400)
    replay = Replay(lambda config, run_ahead, policy: SkipsSomeSteps(config, WholeSteps()))
    for call in file.calls():
        replay.take(call)

    figures = replay.end()
    assert figures.num_differences > 0
    assert figures.differences[0].what == "schedule"


def test_when_plans_are_sent_is_compared_too(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, DegradedPaths())
    recording = recorder.recording("local")
    run_ahead = RecordedRunAhead(recording, 4)
    recorded_scheduler(recording, make_config())
    for step in range(40):
        now_s = 0.01 * step
        run_ahead.due_s(now_s)
        run_ahead.note_sent(StepWork(num_decodes=step % 5 + 1, num_context_tokens=100 * step), now_s)
        run_ahead.due_s(now_s + 0.001)
        run_ahead.note_ended(0.005 + 0.0001 * step, 0.0, now_s + 0.006)
    recorder.close()

    same, other = Replay(whole_steps), Replay(whole_steps)
    for call in RecordingFile.of(next(tmp_path.glob("*.octrec"))).calls():
        same.take(call)
        if call.WhichOneof("call") == "ended" and other.figures.num_calls == 20:
            call.ended.seconds *= 1.001
        other.take(call)
    assert same.end().num_differences == 0
    assert same.figures.num_decisions == 80
    assert other.end().num_differences > 0
