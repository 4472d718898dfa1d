"""A sequence that fails takes nobody with it but what was built on it."""

from scheduler_svc.core.request import FinishReason
from tests.unit.scheduler_svc.core.rig import Rig, make_config, sizes


def test_missing_token_fails_the_sequence_alone() -> None:
    rig = Rig(make_config())
    rig.add([1])
    rig.add([2])
    plan = rig.schedule()
    assert plan is not None

    updates = list(rig.scheduler.apply(1, {plan.chunks[0].seq_id: 5}, {}))
    assert [update.finish_reason for update in updates] == [None, FinishReason.ERROR]
    assert "no token" in updates[1].error_message


def test_who_built_on_a_failed_step_is_computed_again() -> None:
    rig = Rig(make_config(max_chunk_tokens=8))
    owner = rig.add(list(range(14)))
    sharer = rig.add(list(range(16)))
    rig.schedule()
    rig.schedule()
    assert [seq_id for seq_id, _ in sizes(rig.schedule())] == [1, 2]  # attached to blocks that no step has computed yet
    rig.executor.failing.add(rig.seq_ids(owner)[0])

    (update,) = rig.apply()
    assert (update.request_id, update.finish_reason) == (owner, FinishReason.ERROR)
    assert update.error_message == "told to fail"
    rig.wind_up()
    assert rig.ended[rig.seq_ids(sharer)[0]] is FinishReason.LENGTH


def test_who_came_later_finds_nothing_of_a_failed_step() -> None:
    rig = Rig(make_config(max_chunk_tokens=8))
    owner = rig.add(list(range(20)))
    for _ in range(3):
        rig.schedule()
    rig.executor.failing.add(rig.seq_ids(owner)[0])
    rig.apply()

    later = rig.add(list(range(20)))
    rig.schedule()
    assert rig.scheduler.cached_tokens(later) == {}
    rig.wind_up()


def test_blocks_that_were_built_on_a_failed_step_are_forgotten_too() -> None:
    rig = Rig(make_config())
    owner = rig.add(list(range(8)))
    rig.schedule()
    rig.add(list(range(20)))
    assert sizes(rig.schedule()) == [(1, 1), (2, 12)]  # three more full blocks, on top of two that will be bad
    rig.executor.failing.add(rig.seq_ids(owner)[0])
    rig.run()

    rig.add(list(range(20)))
    rig.wind_up()


def test_error_of_one_sample_leaves_the_others() -> None:
    rig = Rig(make_config())
    request_id = rig.add(list(range(10)), n=3)
    rig.schedule()
    rig.schedule()
    rig.apply()
    rig.executor.failing.add(rig.seq_ids(request_id)[1])

    rig.wind_up()
    assert [rig.ended[seq_id] for seq_id in rig.seq_ids(request_id)] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
