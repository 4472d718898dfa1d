"""Blocks between the device and the store: loaded for who waits, saved once they are computed."""

from common.block_hash import chain_keys
from scheduler_svc.core.request import ServiceClass
from tests.unit.scheduler_svc.core.rig import ROOT, Rig, make_config, sizes


def fill_store(rig: Rig, prompt: list[int]) -> None:
    rig.add(prompt, max_tokens=1)
    rig.run()
    while rig.take_saves(100, early=False):
        rig.end_save()
    rig.scheduler.flush_cache()


def test_load_brings_a_prefix_and_holds_the_request_back() -> None:
    rig = Rig(make_config(save_blocks=True))
    fill_store(rig, list(range(20)))
    request_id = rig.add(list(range(20)))

    assert len(rig.scheduler.missing_keys(request_id)) == 4  # the fifth ends with the prompt
    assert rig.begin_load(request_id, 4, early=False)
    assert rig.schedule() is None
    assert rig.scheduler.missing_keys(request_id) == ()
    rig.end_load()
    assert sizes(rig.schedule()) == [(2, 4)]
    assert rig.scheduler.cached_tokens(request_id) == {"shm": 16}
    rig.wind_up()


def test_partial_load_counts_as_far_as_it_got() -> None:
    rig = Rig(make_config(save_blocks=True))
    fill_store(rig, list(range(20)))
    rig.add(list(range(4)), max_tokens=1)
    rig.run()
    request_id = rig.add(list(range(20)))

    assert rig.begin_load(request_id, 2, early=True)
    rig.end_load()
    assert sizes(rig.schedule()) == [(3, 8)]
    assert rig.scheduler.cached_tokens(request_id) == {"device": 4, "shm": 8}
    rig.wind_up()


def test_second_request_waits_for_the_first_ones_load() -> None:
    rig = Rig(make_config(save_blocks=True))
    fill_store(rig, list(range(20)))
    first, second = rig.add(list(range(20))), rig.add(list(range(18)))
    assert rig.begin_load(first, 4, early=False)

    assert not rig.begin_load(second, 4, early=False)
    assert rig.schedule() is None
    rig.end_load()
    assert sizes(rig.schedule()) == [(2, 4), (3, 2)]
    rig.wind_up()


def test_blocks_of_a_load_are_held_though_its_request_is_cancelled() -> None:
    rig = Rig(make_config(num_blocks=8, save_blocks=True))
    fill_store(rig, list(range(20)))
    cancelled = rig.add(list(range(20)))
    assert rig.begin_load(cancelled, 4, early=False)
    rig.cancel(cancelled)
    rig.add([9] * 18)  # five blocks: four are free

    assert rig.schedule() is None
    rig.end_load()
    assert sizes(rig.schedule()) == [(3, 18)]
    rig.wind_up()


def rig_with_a_cancelled_step_in_flight(num_blocks: int) -> tuple[Rig, int]:
    """A step that may touch five blocks, a load into four; and the step's id."""
    rig = Rig(make_config(num_blocks=num_blocks, save_blocks=True))
    fill_store(rig, list(range(20)))
    runner = rig.add([9] * 20, max_tokens=9)
    rig.schedule()
    rig.cancel(runner)
    assert rig.begin_load(rig.add(list(range(20))), 4, early=True)
    return rig, rig.plans[0].step_id


def test_blocks_that_a_step_in_flight_may_touch_are_loaded_into_after_it() -> None:
    rig, step_id = rig_with_a_cancelled_step_in_flight(num_blocks=8)
    plan, _, early = rig.loads[0]
    assert (plan.after_step, early) == (step_id, False), "three blocks are untouched"
    rig.end_load()
    assert not rig.plans, "the step had run before"
    rig.wind_up()


def test_blocks_that_no_step_touches_are_loaded_into_at_once() -> None:
    rig, _ = rig_with_a_cancelled_step_in_flight(num_blocks=12)
    assert rig.loads[0][0].after_step == 0
    rig.wind_up()


def test_a_preempted_sequence_finds_its_blocks_in_the_store() -> None:
    rig = Rig(make_config(num_blocks=10, max_num_seqs=2, save_blocks=True))
    victim = rig.add(list(range(20)), max_tokens=12, service_class=ServiceClass.BATCH)
    for _ in range(6):
        rig.schedule()
        rig.apply()
    while rig.take_saves(100, early=True):
        rig.end_save()
    urgent = rig.add([9] * 36, max_tokens=2, service_class=ServiceClass.INTERACTIVE)
    rig.schedule()
    rig.apply()
    assert rig.scheduler.stats().num_preemptions == 1
    assert rig.scheduler.next_in_line == victim
    while urgent in rig.live_requests():
        rig.schedule()
        rig.apply()
    num_waiting, num_missing = len(rig.scheduler.waiting_keys(victim)), len(rig.scheduler.missing_keys(victim))
    assert num_waiting == 6 and num_missing > 0, "output too, but for the block of the last token"
    assert rig.begin_load(victim, num_missing, early=True)
    assert rig.scheduler.next_in_line is None
    rig.end_load()
    plan = rig.schedule()
    assert plan is not None and [new.num_computed_tokens for new in plan.new_sequences] == [24]
    assert rig.scheduler.stats().num_recomputed_tokens < 4
    rig.apply()
    assert rig.scheduler.waiting_keys(victim) == (), "it runs"
    rig.wind_up()


def test_late_news_of_unknown_transfers_is_fine() -> None:
    rig = Rig(make_config())
    rig.scheduler.end_load(7, 3, {})
    rig.scheduler.end_save(7)
    rig.scheduler.finish_sequence(rig.seq_ids(rig.add([1]))[0])
    rig.scheduler.check_integrity()


def test_block_is_saved_once_and_only_when_computed() -> None:
    rig = Rig(make_config(save_blocks=True))
    rig.add(list(range(10)), max_tokens=1)
    rig.schedule()
    assert rig.scheduler.take_saves(10) is None
    rig.apply()

    plan = rig.scheduler.take_saves(1)
    assert plan is not None
    assert list(plan.keys) == chain_keys(ROOT, range(10), 4)[:1]
    second = rig.scheduler.take_saves(10)
    assert second is not None
    assert list(second.keys) == chain_keys(ROOT, range(10), 4)[1:]
    assert rig.scheduler.flush_cache() == 0
    rig.scheduler.end_save(plan.save_id)
    rig.scheduler.end_save(second.save_id)
    rig.add(list(range(10)), max_tokens=1)
    rig.run()
    assert rig.scheduler.take_saves(10) is None
    assert rig.scheduler.flush_cache() == 2


def test_loaded_blocks_are_not_saved_again() -> None:
    rig = Rig(make_config(save_blocks=True))
    fill_store(rig, list(range(9)))
    request_id = rig.add(list(range(9)), max_tokens=1)
    rig.begin_load(request_id, 2, early=True)
    rig.end_load()
    rig.run()

    assert rig.scheduler.take_saves(10) is None
