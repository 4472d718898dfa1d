"""The scheduler, one behaviour after another, against an executor that checks every KV slot it reads."""

import pytest

from common.block_hash import chain_keys
from common.errors import DuplicateRequest, KvPoolTooSmall, QueueFull
from common.ids import RequestId
from scheduler_svc.core.plan import Chunk, StepPlan
from scheduler_svc.core.prefill_budget import WholeSteps
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.step_time import StepWork
from tests.unit.scheduler_svc.core.model_executor import expected_output
from tests.unit.scheduler_svc.core.rig import ROOT, Rig, make_config, sizes


def test_decodes_come_first_and_prefill_gets_what_is_left() -> None:
    rig = Rig(make_config(max_num_batched_tokens=10))
    rig.add([1] * 4)
    rig.add([2] * 3)
    assert sizes(rig.schedule()) == [(1, 4), (2, 3)]
    rig.add([3] * 20)

    assert sizes(rig.schedule()) == [(1, 1), (2, 1), (3, 8)]
    assert sizes(rig.schedule()) == [(1, 1), (2, 1), (3, 8)]
    rig.wind_up()


class Budget(WholeSteps):
    """So many prompt tokens beside decodes."""

    def __init__(self, num_tokens: int):
        self._num_tokens = num_tokens

    def num_tokens(self, decodes: StepWork, num_waiting_tokens: int) -> int:
        return self._num_tokens if decodes.num_decodes else 1000


def test_beside_decodes_prompts_go_whole_up_to_what_they_should_take() -> None:
    rig = Rig(make_config(), Budget(8))
    rig.add([1] * 4, max_tokens=20)
    assert sizes(rig.schedule()) == [(1, 4)]
    for token, length in enumerate((3, 4, 2, 10, 6), start=2):
        rig.add([token] * length, max_tokens=1)

    assert sizes(rig.schedule()) == [(1, 1), (2, 3), (3, 4)]
    assert sizes(rig.schedule()) == [(1, 1), (4, 2)], "the next one would be cut"
    assert sizes(rig.schedule()) == [(1, 1), (5, 10)], "whole, because it is the first"
    assert sizes(rig.schedule()) == [(1, 1), (6, 6)]
    rig.wind_up()


def test_a_prompt_that_no_step_could_take_whole_is_cut_to_what_prompts_should_take() -> None:
    rig = Rig(make_config(), Budget(8))
    rig.add([1] * 4, max_tokens=20)
    rig.schedule()
    rig.add([2] * 40, max_tokens=1)
    rig.add([3] * 5, max_tokens=1)

    assert sizes(rig.schedule()) == [(1, 1), (2, 8)]
    assert sizes(rig.schedule()) == [(1, 1), (2, 8)], "32 are left, one more than fits"
    assert sizes(rig.schedule()) == [(1, 1), (2, 24)]
    rig.wind_up()


def test_chunks_are_no_longer_than_told() -> None:
    rig = Rig(make_config(max_chunk_tokens=7))
    rig.add(list(range(20)), max_tokens=1)
    rig.add(list(range(20, 30)), max_tokens=1)

    assert sizes(rig.schedule()) == [(1, 7), (2, 7)]
    assert sizes(rig.schedule()) == [(1, 7), (2, 3)]
    assert sizes(rig.schedule()) == [(1, 6)]
    assert rig.schedule() is None
    rig.wind_up()


def test_admission_follows_arrival_and_stops_at_the_limit_of_sequences() -> None:
    rig = Rig(make_config(max_num_seqs=2))
    for i in range(3):
        rig.add([i] * 3, max_tokens=2)

    assert [seq_id for seq_id, _ in sizes(rig.schedule())] == [1, 2]
    rig.apply()
    rig.schedule()
    rig.apply()
    assert sizes(rig.schedule()) == [(3, 3)]
    rig.wind_up()


def test_plan_is_a_delta() -> None:
    rig = Rig(make_config())
    rig.add([1, 2, 3, 4, 5], max_tokens=6)

    first, second, third = rig.schedule(), rig.schedule(), rig.schedule()
    assert first is not None
    assert second is not None
    assert third is not None
    assert len(first.new_sequences) == 1
    assert first.new_sequences[0].token_ids == (1, 2, 3, 4, 5)
    assert first.chunks == (Chunk(first.chunks[0].seq_id, 5, first.chunks[0].new_block_ids),)
    assert len(first.chunks[0].new_block_ids) == 2
    assert second.new_sequences == ()
    assert [chunk.new_block_ids for chunk in second.chunks + third.chunks] == [(), ()]
    rig.wind_up()


def test_no_token_is_planned_beyond_max_tokens() -> None:
    rig = Rig(make_config())
    rig.add([1, 2, 3], max_tokens=2)

    assert rig.schedule() is not None
    assert rig.schedule() is not None
    assert rig.schedule() is None
    rig.apply()
    assert rig.schedule() is None
    assert rig.apply()[0].finish_reason is FinishReason.LENGTH
    assert rig.scheduler.stats().num_discarded_tokens == 0
    rig.wind_up()


def test_token_planned_past_a_stop_is_discarded_and_the_sequence_dropped() -> None:
    rig = Rig(make_config())
    request_id = rig.add([1, 2, 3], max_tokens=9, stop=set(range(50)))
    other = rig.add([4, 5], max_tokens=9)
    rig.schedule()
    rig.schedule()

    (update, _) = rig.apply()
    assert (update.finish_reason, update.stop_token_id) == (FinishReason.STOP, update.token_ids[-1])
    plan = rig.schedule()
    assert plan is not None
    assert plan.dropped_seq_ids == rig.seq_ids(request_id)
    assert [update.request_id for update in rig.apply()] == [other]
    assert rig.scheduler.stats().num_discarded_tokens == 1
    rig.wind_up()


def test_result_out_of_order_is_refused() -> None:
    rig = Rig(make_config())
    rig.add([1])
    rig.schedule()

    with pytest.raises(ValueError, match="step 2, the next one to come is 1"):
        rig.scheduler.apply(2, {}, {})


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_cancel_frees_blocks_for_the_very_next_plan(num_steps: int) -> None:
    rig = Rig(make_config(num_blocks=4, max_chunk_tokens=8))
    victim = rig.add(list(range(12)), max_tokens=5)
    for _ in range(num_steps):
        rig.schedule()
    rig.cancel(victim)
    follower = rig.add([9] * 15, max_tokens=1)

    plan = rig.schedule()
    assert plan is not None
    assert sizes(plan) == [(2, 8)]
    assert plan.dropped_seq_ids == (rig.seq_ids(victim) if num_steps else ())
    rig.wind_up(run_ahead=2)
    assert rig.outputs[rig.seq_ids(follower)[0]]


def test_cancel_of_an_unknown_request_is_false() -> None:
    assert not Rig(make_config()).scheduler.cancel(RequestId("nobody"))


def test_preemption_keeps_every_token_and_the_oldest_goes_on() -> None:
    rig = Rig(make_config(num_blocks=8, max_num_seqs=4))
    requests = [rig.add([i, i + 1, i + 2], max_tokens=20) for i in range(4)]

    rig.wind_up(run_ahead=2)

    assert rig.scheduler.stats().num_preemptions > 0
    assert next(iter(rig.ended)) == rig.seq_ids(requests[0])[0]


def test_preempted_sequence_waits_for_its_token_in_flight() -> None:
    rig = Rig(make_config(num_blocks=4, max_num_seqs=2))
    rig.add([1, 2, 3], max_tokens=12)
    rig.add([4, 5, 6], max_tokens=12)
    dropped: list[StepPlan] = []
    while not dropped:
        if len(rig.plans) == 3:
            rig.apply()
        plan = rig.schedule()
        assert plan is not None
        if plan.dropped_seq_ids:
            dropped.append(plan)
    num_known = len(rig.outputs[rig.seq_ids(RequestId("r1"))[0]])
    num_unapplied = len(rig.plans) - 1

    assert rig.schedule() is not None  # of the oldest
    while rig.plans and rig.plans[0].step_id < dropped[0].step_id:
        rig.apply()
    assert len(rig.outputs[rig.seq_ids(RequestId("r1"))[0]]) == num_known + num_unapplied
    rig.wind_up()


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    rig = Rig(make_config(num_blocks=8))
    rig.add([1] * 9, max_tokens=2)
    rig.add([2] * 13, max_tokens=2)
    assert [seq_id for seq_id, _ in sizes(rig.schedule())] == [1, 2]
    rig.add([3], max_tokens=2)

    assert [seq_id for seq_id, _ in sizes(rig.schedule())] == [1, 2]  # one block is free, two sequences run
    rig.wind_up()


def test_bounded_queue_refuses_with_a_delay() -> None:
    rig = Rig(make_config(max_waiting_requests=2, max_waiting_tokens=10))
    rig.add([1] * 30, max_tokens=1)  # an empty queue takes any
    rig.schedule()
    rig.add([1] * 9)
    with pytest.raises(QueueFull, match="limit of 10") as error:
        rig.add([1] * 2)
    assert error.value.retry_after_s is not None
    rig.add([1])
    with pytest.raises(QueueFull, match="limit is 2"):
        rig.add([1])
    rig.wind_up()


def test_request_that_never_fits_is_refused_with_the_limit() -> None:
    rig = Rig(make_config(num_blocks=4))
    rig.add([1] * 10, max_tokens=7)  # 16 tokens are computed

    with pytest.raises(KvPoolTooSmall, match=r"5 blocks of 4 tokens.* has 4"):
        rig.add([1] * 10, max_tokens=8)
    rig.wind_up()


def test_request_id_in_use_is_refused_and_free_after_the_end() -> None:
    rig = Rig(make_config())
    request, _ = rig.requests[rig.add([1], max_tokens=1)]
    with pytest.raises(DuplicateRequest, match="r0"):
        rig.scheduler.add(request)
    rig.run()

    assert rig.scheduler.add(request) == (2,)


def test_waiting_requests_expire_and_running_ones_do_not() -> None:
    rig = Rig(make_config(max_num_seqs=1))
    rig.add([1], queue_deadline_s=5.0)
    late = rig.add([2], queue_deadline_s=5.0)
    rig.schedule()
    assert rig.scheduler.expire(5.0) == []

    updates = rig.scheduler.expire(5.1)
    assert [(update.request_id, update.finish_reason) for update in updates] == [(late, FinishReason.QUEUE_TIMEOUT)]
    rig.take(updates)
    rig.wind_up()


def test_drain_takes_only_what_was_never_admitted() -> None:
    rig = Rig(make_config(max_num_seqs=1))
    rig.add([1], n=3)
    waiting = [rig.add([2]), rig.add([3])]
    rig.schedule()

    assert [request.request_id for request in rig.scheduler.drain()] == waiting
    assert rig.scheduler.stats().num_waiting_requests == 0
    rig.run()
    assert not rig.scheduler.has_work


def test_reset_goes_on_with_the_tokens_that_came_out() -> None:
    rig = Rig(make_config())
    requests = [rig.add([i, i, i], max_tokens=10) for i in range(3)]
    for _ in range(4):
        rig.schedule()
    rig.apply()
    rig.apply()

    rig.reset()
    plan = rig.schedule()
    assert plan is not None
    assert plan.step_id == 1
    assert [len(new.token_ids) for new in plan.new_sequences] == [5, 5, 5]
    assert [new.num_prompt_tokens for new in plan.new_sequences] == [3, 3, 3]
    rig.wind_up()
    for request_id in requests:
        request, (seq_id,) = rig.requests[request_id]
        assert rig.outputs[seq_id] == expected_output(request, 0)[0]


def test_figures_of_blocks_and_waste() -> None:
    rig = Rig(make_config())
    rig.add(list(range(9)), max_tokens=9)
    rig.schedule()

    stats = rig.scheduler.stats()
    assert (stats.num_running_requests, stats.num_running_sequences, stats.num_waiting_requests) == (1, 1, 0)
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.num_free_blocks) == (3, 0, 61)
    assert stats.kv_waste_ratio == 2 / 12  # nine tokens and the one in flight
    assert stats.largest_free_run == 61
    rig.run()
    stats = rig.scheduler.stats()
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.kv_waste_ratio) == (0, 4, 0.0)
    assert rig.scheduler.num_device_tokens(ROOT, chain_keys(ROOT, range(9), 4)) == 8


def test_admission_time_is_the_first_one() -> None:
    rig = Rig(make_config(max_num_seqs=1))
    request_id = rig.add([1], n=2)
    assert rig.scheduler.admitted_at_s(request_id) is None
    rig.now_s = 3.0
    rig.schedule()
    rig.now_s = 4.0
    while len(rig.ended) < 1:
        rig.apply()
        rig.schedule()

    assert rig.scheduler.admitted_at_s(request_id) == 3.0
    rig.wind_up()
    assert rig.scheduler.admitted_at_s(request_id) is None
