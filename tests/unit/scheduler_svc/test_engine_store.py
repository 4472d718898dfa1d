"""Requests and the block store: what is loaded for whom, what comes up meanwhile, when blocks are saved."""

import asyncio

from common.clock import ManualClock
from common.errors import (
    Cancelled,
)
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.engine import Engine
from tests.unit.scheduler_svc.running_engine import running
from tests.unit.scheduler_svc.scripted_executor import (
    RecordedOutput,
    ScriptedExecutor,
    ScriptedLink,
    ScriptedStore,
    make_request,
    settle,
)


async def test_stored_blocks_are_loaded_before_the_request_runs() -> None:
    store = ScriptedStore(["shm", "disk"])
    executor = ScriptedExecutor(kv_transport="shm")
    async with running(executor, store=store) as engine:
        generation = await engine.submit(make_request(prompt=range(1, 14)), RecordedOutput())
        await settle()
        link = executor.links[0]
        assert len(store.asked[0]) == 3 and not link.plans
        load = link.commands[0].load_blocks
        assert list(load.keys) == store.asked[0][:2]
        loaded = pb.BlocksLoaded(load_id=load.load_id, num_loaded=2, num_by_tier={"shm": 1, "disk": 1}, seconds=0.1)
        await link.say(pb.RunSessionResponse(blocks_loaded=loaded))
        assert link.plans[0].new_sequences[0].num_computed_tokens == 8
        assert generation.cached_tokens_by_tier == {"shm": 4, "disk": 4}


async def test_blocks_of_a_request_that_finds_no_room_come_up_while_it_waits_and_are_loaded_when_there_is() -> None:
    store = ScriptedStore()
    executor = ScriptedExecutor(kv_transport="shm", num_blocks=8)
    async with running(executor, store=store) as engine:
        await engine.submit(make_request("first", prompt=range(1, 29), max_tokens=2), RecordedOutput())
        await settle()
        store.tiers = ["disk", "disk", "disk"]
        await engine.submit(make_request("second", prompt=range(61, 75), max_tokens=2), RecordedOutput())
        await settle()
        link = executor.links[0]
        assert store.prefetched == [store.asked[1]] and not any(c.HasField("load_blocks") for c in link.commands)
        await link.answer(link.plans[0], 9)
        await link.answer(link.plans[1], 9)
        (load,) = [command.load_blocks for command in link.commands if command.HasField("load_blocks")]
        assert list(load.keys) == store.asked[1]


async def test_a_preempted_request_gets_what_the_store_has_of_it_when_it_is_its_turn_again() -> None:
    store = ScriptedStore()
    executor = ScriptedExecutor(kv_transport="shm", num_blocks=6, max_num_seqs=1)
    async with running(executor, store=store) as engine:
        patient, urgent = RecordedOutput(), RecordedOutput()
        request = make_request("patient", prompt=range(1, 21), max_tokens=5, service_class=ServiceClass.BATCH)
        await engine.submit(request, patient)
        await settle()
        link = executor.links[0]
        await link.answer(link.plans[0], 50)
        store.tiers = ["shm"] * 5
        request = make_request("urgent", prompt=range(90, 94), max_tokens=12, service_class=ServiceClass.INTERACTIVE)
        await engine.submit(request, urgent)
        await settle()
        await link.answer(link.plans[1], 50)
        assert len(store.asked) == 2 and len(store.asked[1]) == 5, "all of its full blocks, though the device still has them"
        num_answered = 2
        while not urgent.is_over:
            await link.answer(link.plans[num_answered], 51)
            num_answered += 1
        while num_answered < len(link.plans):
            await link.answer(link.plans[num_answered], 51)
            num_answered += 1
        (load,) = [command.load_blocks for command in link.commands if command.HasField("load_blocks")]
        assert 0 < len(load.block_ids) < 5
        assert list(load.keys) == store.asked[1][-len(load.block_ids) :], "those that are gone"
        loaded = pb.BlocksLoaded(
            load_id=load.load_id, num_loaded=len(load.block_ids), num_by_tier={"shm": len(load.block_ids)}, seconds=0.1
        )
        await link.say(pb.RunSessionResponse(blocks_loaded=loaded))
        assert link.plans[num_answered].new_sequences[0].num_computed_tokens == 20


async def test_a_prefetch_ends_with_its_request() -> None:
    store = ScriptedStore(["disk", "disk", "disk"])
    store.may_come.clear()
    executor = ScriptedExecutor(kv_transport="shm", num_blocks=8)
    async with running(executor, store=store) as engine:
        store.tiers = []
        await engine.submit(make_request("first", prompt=range(1, 29), max_tokens=2), RecordedOutput())
        await settle()
        store.tiers = ["disk", "disk", "disk"]
        await engine.submit(make_request("second", prompt=range(61, 75), max_tokens=2), RecordedOutput())
        await settle()
        assert len(store.prefetched) == 1 and store.num_ended_prefetches == 0

        assert engine.cancel(make_request("second").request_id, Cancelled("by the test"))
        await settle()

        assert store.num_ended_prefetches == 1


async def test_a_request_that_is_cancelled_during_its_look_up_is_never_queued() -> None:
    store = ScriptedStore(["shm"])
    store.may_answer.clear()
    executor = ScriptedExecutor(kv_transport="shm")
    async with running(executor, store=store) as engine:
        output = RecordedOutput()
        submitting = asyncio.create_task(engine.submit(make_request(prompt=range(1, 14)), output))
        await settle()
        assert engine.cancel(make_request().request_id, Cancelled("by the test"))
        store.may_answer.set()
        await submitting
        await settle()
        assert isinstance(output.error, Cancelled)
        assert not executor.links[0].commands and engine.num_open_requests == 0
        assert engine.counters.num_cancelled_requests == 1


async def test_a_caller_that_goes_during_the_look_up_leaves_nothing_behind() -> None:
    store = ScriptedStore(["shm"])
    store.may_answer.clear()
    async with running(ScriptedExecutor(kv_transport="shm"), store=store) as engine:
        submitting = asyncio.create_task(engine.submit(make_request(prompt=range(1, 14)), RecordedOutput()))
        await settle()
        submitting.cancel()
        await settle()
        assert engine.num_open_requests == 0
        await engine.wait_idle()


async def test_a_few_new_blocks_wait_for_others_before_they_are_saved() -> None:
    executor, clock = ScriptedExecutor(kv_transport="shm"), ManualClock()
    async with running(executor, clock=clock) as engine:
        await engine.submit(make_request(prompt=range(10), max_tokens=20), RecordedOutput())
        await settle()
        link = executor.links[0]
        await link.answer(link.plans[0], 9)
        assert not saves(link)

        clock.advance(1.0)
        await link.answer(link.plans[1], 9)

        assert [len(save.keys) for save in saves(link)] == [2]


async def test_blocks_are_saved_when_no_step_runs_any_more() -> None:
    executor, clock = ScriptedExecutor(kv_transport="shm"), ManualClock()
    async with running(executor, clock=clock) as engine:
        await engine.submit(make_request(prompt=range(10), max_tokens=1), RecordedOutput())
        await settle()
        link = executor.links[0]
        await link.answer(link.plans[0], 9)
        assert not saves(link)

        clock.advance(1.0)
        async with asyncio.timeout(5):
            while not saves(link):
                await asyncio.sleep(0.01)

        assert [len(save.keys) for save in saves(link)] == [2]


async def test_waiting_for_saves_ends_with_the_last_of_them() -> None:
    executor, clock = ScriptedExecutor(kv_transport="shm"), ManualClock()
    async with running(executor, clock=clock) as engine:
        link = await link_with_a_save(executor, engine, clock)
        waiting = asyncio.create_task(engine.saves_end(5.0))
        await settle()
        assert not waiting.done()

        await link.say(pb.RunSessionResponse(blocks_saved=pb.BlocksSaved(save_id=saves(link)[0].save_id)))

        await asyncio.wait_for(waiting, 1.0)
        assert not engine.degraded.counts


async def test_waiting_for_saves_ends_with_their_session() -> None:
    executor, clock = ScriptedExecutor(kv_transport="shm"), ManualClock()
    async with running(executor, clock=clock) as engine:
        link = await link_with_a_save(executor, engine, clock)
        waiting = asyncio.create_task(engine.saves_end(5.0))
        await link.say(None)

        await asyncio.wait_for(waiting, 1.0)


async def test_a_save_that_does_not_end_is_not_waited_for_for_ever() -> None:
    executor, clock = ScriptedExecutor(kv_transport="shm"), ManualClock()
    async with running(executor, clock=clock) as engine:
        await link_with_a_save(executor, engine, clock)

        await engine.saves_end(0.01)

        assert engine.degraded.counts["flush_incomplete"] == 1


async def link_with_a_save(executor: ScriptedExecutor, engine: Engine, clock: ManualClock) -> ScriptedLink:
    """A session with one save under way."""
    await engine.submit(make_request(prompt=range(10), max_tokens=20), RecordedOutput())
    await settle()
    link = executor.links[0]
    await link.answer(link.plans[0], 9)
    clock.advance(1.0)
    await link.answer(link.plans[1], 9)
    assert len(saves(link)) == 1
    return link


def saves(link: ScriptedLink) -> list[pb.SaveBlocks]:
    return [command.save_blocks for command in link.commands if command.HasField("save_blocks")]
