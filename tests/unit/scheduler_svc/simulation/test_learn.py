"""What is learned of an executor from the steps of a recording: enough to live them again."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.core.step_time import StepWork
from scheduler_svc.simulation.learn import fit, learn_profile
from scheduler_svc.simulation.profile import DeviceProfile
from scheduler_svc.simulation.recorded import MeasuredStep, RecordedRun

GAP_S = 0.001


def steps_in_a_row(works: Sequence[StepWork], model: DeviceProfile, idle_s: Sequence[float]) -> list[MeasuredStep]:
    """Each planned long before the one ahead of it ends."""
    times, steps, now_s = model.step_times(), [], 0.0
    for number, (work, waited_s) in enumerate(zip(works, idle_s, strict=True)):
        seconds = times.predict_s(work)
        ended_s = now_s + GAP_S + waited_s + seconds
        steps.append(MeasuredStep(work, now_s - 0.02, ended_s, seconds, waited_s, was_alone=number == 0))
        now_s = ended_s
    return steps


def mixed_works() -> list[StepWork]:
    return [
        StepWork(num_prefill_tokens=p, num_attended=p * p // 2, num_decodes=d, num_context_tokens=600 * d + 77 * (d % 7))
        for d in range(0, 64, 3)
        for p in (0, 128, 512, 2048, 4096)
        if p or d
    ]


def learn(steps: list[MeasuredStep]) -> DeviceProfile:
    start = pb.Start(num_blocks=100, block_size=16, max_num_seqs=8, max_num_batched_tokens=512)
    return learn_profile(RecordedRun(steps=steps, start=start), "learned")


def test_the_times_of_steps_are_found_again() -> None:
    true = DeviceProfile("true", (0.004, 0.001, 0.0, 0.02, 0.001, 0.15, 0.3))
    works = mixed_works()
    model, found = true.step_times(), DeviceProfile("found", fit(steps_in_a_row(works, true, [0.0] * len(works)))).step_times()

    assert max(abs(found.predict_s(work) / model.predict_s(work) - 1) for work in works) < 0.02


def test_steps_with_many_prompt_tokens_may_be_the_quicker_ones() -> None:
    true = DeviceProfile("true", (0.005, 0.001, -0.004, 0.02, 0.001, 0.15, 0.3))
    works = mixed_works()

    assert fit(steps_in_a_row(works, true, [0.0] * len(works)))[2] == pytest.approx(-0.004, abs=0.0005)


def test_what_passes_between_steps_and_before_them_is_learned() -> None:
    works = mixed_works()
    hitches = [0.002 if number % 10 == 5 else 0.0 for number in range(len(works))]
    profile = learn(steps_in_a_row(works, DeviceProfile("true", (0.05, 0, 0, 0, 0, 0, 0)), hitches))

    assert profile.between_steps_s == pytest.approx(GAP_S)
    assert sum(profile.hitches_s) / len(profile.hitches_s) == pytest.approx(0.0002, rel=0.2)


def test_waiting_for_a_plan_that_came_late_is_no_hitch() -> None:
    works = mixed_works()
    steps = steps_in_a_row(works, DeviceProfile("true", (0.05, 0, 0, 0, 0, 0, 0)), [0.01] * len(works))
    late = [replace(step, sent_s=step.ended_s - step.seconds - 0.001) for step in steps]

    assert learn(late).hitches_s == (0.0,)


def test_steps_of_each_kind_have_a_spread_of_their_own() -> None:
    works = mixed_works()
    steps = steps_in_a_row(works, DeviceProfile("true", (0.05, 0, 0, 0, 0, 0, 0)), [0.0] * len(works))
    slow = [
        replace(s, seconds=s.seconds * (1 + 0.5 * (i % 2))) if 0 < s.work.num_prefill_tokens <= 1024 else s
        for i, s in enumerate(steps)
    ]
    profile = learn(slow)

    assert max(profile.short_prefill_ratios) / min(profile.short_prefill_ratios) > 1.3
    assert max(profile.prefill_ratios) / min(profile.prefill_ratios) < 1.1
    assert profile.ratios_of(StepWork(num_decodes=3)) is profile.decode_ratios
