"""What is computed once for several: prompts of others, samples of one request, the turn before."""

from common.ids import RequestId
from scheduler_svc.core.request import FinishReason
from tests.unit.scheduler_svc.core.rig import OTHER_ROOT, Rig, make_config, sizes


def test_requests_with_one_prompt_compute_it_once() -> None:
    rig = Rig(make_config(max_chunk_tokens=8, max_num_batched_tokens=64))
    prompt = list(range(30))
    requests = [rig.add(prompt, max_tokens=1) for _ in range(8)]

    assert sizes(rig.schedule()) == [(1, 8)]
    assert sizes(rig.schedule()) == [(1, 8)]
    assert sizes(rig.schedule()) == [(1, 8)]
    assert sizes(rig.schedule()) == [(1, 6)]
    assert sizes(rig.schedule()) == [(seq_id, 2) for seq_id in range(2, 9)]  # what no full block holds
    assert rig.scheduler.cached_tokens(requests[0]) == {}
    assert [rig.scheduler.cached_tokens(request_id) for request_id in requests[1:]] == [{"device": 28}] * 7
    assert rig.scheduler.stats().num_shared_blocks == 7
    rig.wind_up(run_ahead=2)
    assert rig.executor.num_computed_tokens == 30 + 7 * 2


def test_who_waits_for_a_prefix_goes_on_alone_when_its_owner_is_cancelled() -> None:
    rig = Rig(make_config(max_chunk_tokens=8))
    first = rig.add(list(range(30)))
    rig.add(list(range(30)))
    rig.schedule()
    assert sizes(rig.schedule()) == [(1, 8)]

    rig.cancel(first)
    assert sizes(rig.schedule()) == [(2, 8)]  # 16 tokens are there already
    assert rig.scheduler.cached_tokens(RequestId("r1")) == {"device": 16}
    rig.wind_up()


def test_waiting_for_a_prefix_does_not_hold_up_others() -> None:
    rig = Rig(make_config(max_chunk_tokens=8))
    for prompt in (list(range(30)), list(range(30)), [7, 7]):
        rig.add(prompt)

    assert sizes(rig.schedule()) == [(1, 8), (3, 2)]
    rig.wind_up()


def test_samples_share_the_prompt_and_copy_only_the_last_block() -> None:
    rig = Rig(make_config())
    rig.add(list(range(10)), max_tokens=5, n=4)

    first, second = rig.schedule(), rig.schedule()
    assert sizes(first) == [(1, 10)]
    assert second is not None
    assert sizes(second) == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert len(second.block_copies) == 3
    assert len({copy.source for copy in second.block_copies}) == 1
    assert [new.num_computed_tokens for new in second.new_sequences] == [9, 9, 9]
    assert [new.sampling.seed for new in second.new_sequences] == [8, 9, 10]
    stats = rig.scheduler.stats()
    assert (stats.num_shared_blocks, stats.num_used_blocks) == (2, 2 + 4)
    rig.wind_up(run_ahead=2)
    assert rig.executor.num_block_copies == 3


def test_samples_share_without_prefix_caching_too() -> None:
    rig = Rig(make_config(prefix_caching=False))
    rig.add(list(range(10)), n=3)
    rig.run()
    rig.add(list(range(10)))

    rig.wind_up()
    assert rig.executor.num_computed_tokens == (10 + 3) + 2 * (1 + 3) + (10 + 3)


def test_sample_goes_on_when_the_first_is_finished_early() -> None:
    rig = Rig(make_config(max_chunk_tokens=4))
    request_id = rig.add(list(range(10)), n=2)
    rig.schedule()

    rig.finish(rig.seq_ids(request_id)[0])
    rig.wind_up()
    assert rig.ended[rig.seq_ids(request_id)[1]] is FinishReason.LENGTH


def test_hit_of_a_whole_prompt_copies_its_last_block() -> None:
    rig = Rig(make_config())
    rig.add(list(range(12)))
    rig.run()
    again = rig.add(list(range(12)))

    plan = rig.schedule()
    assert plan is not None
    assert sizes(plan) == [(2, 1)]
    assert len(plan.block_copies) == 1
    assert rig.scheduler.cached_tokens(again) == {"device": 11}
    rig.wind_up()


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    rig = Rig(make_config())
    first = rig.add(list(range(6)), max_tokens=8)
    rig.run()
    history = [*range(6), *rig.outputs[rig.seq_ids(first)[0]]]
    second = rig.add([*history, 1, 2, 3])

    rig.schedule()
    assert rig.scheduler.cached_tokens(second) == {"device": 12}  # the last output was never computed
    rig.wind_up()


def test_other_salts_share_nothing() -> None:
    rig = Rig(make_config())
    rig.add(list(range(12)))
    rig.run()
    other = rig.add(list(range(12)), root=OTHER_ROOT)

    assert sizes(rig.schedule()) == [(2, 12)]
    assert rig.scheduler.cached_tokens(other) == {}
    rig.wind_up()


def test_prompt_and_output_are_one_run_of_blocks() -> None:
    rig = Rig(make_config())
    rig.add(list(range(20)), max_tokens=20)
    blocks = []
    while rig.scheduler.has_work:
        plan = rig.schedule()
        if plan is not None:
            blocks += [block_id for chunk in plan.chunks for block_id in chunk.new_block_ids]
        rig.apply()

    assert blocks == list(range(blocks[0], blocks[0] + 10))
