import pytest

from common.clock import ManualClock
from common.errors import (
    Cancelled,
    Draining,
    DuplicateRequest,
    ExecutorLost,
    KvPoolTooSmall,
    ModelLoading,
    NoExecutor,
    QueueFull,
    QueueTimeout,
    Unavailable,
)
from common.token_ids import unpack_token_ids
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc.core.request import FinishReason
from tests.unit.scheduler_svc.running_engine import check_integrity, running
from tests.unit.scheduler_svc.scripted_executor import (
    RecordedOutput,
    ScriptedExecutor,
    make_request,
    settle,
)


async def test_a_second_plan_goes_out_before_the_first_result_and_a_third_right_after_it() -> None:
    executor = ScriptedExecutor()
    async with running(executor) as engine:
        output = RecordedOutput()
        await engine.submit(make_request(), output)
        await settle()
        link = executor.links[0]
        assert [plan.step_id for plan in link.plans] == [1, 2]
        await link.answer(link.plans[0], 9)
        assert [plan.step_id for plan in link.plans] == [1, 2, 3]
        assert output.token_ids == [9]


async def test_requests_of_one_moment_share_a_step() -> None:
    executor = ScriptedExecutor()
    async with running(executor) as engine:
        for name in "abc":
            await engine.submit(make_request(name, prompt=[ord(name) - 90]), RecordedOutput())
        await settle()
        assert len(executor.links[0].plans[0].new_sequences) == 3


async def test_an_end_that_is_seen_in_the_text_costs_one_token_at_most() -> None:
    executor = ScriptedExecutor()
    async with running(executor) as engine:
        output = RecordedOutput(end_after=2)
        await engine.submit(make_request(), output)
        await settle()
        link = executor.links[0]
        await link.answer(link.plans[0], 9)
        await link.answer(link.plans[1], 9)
        assert output.is_over and engine.num_open_requests == 0
        # The third plan was under way; no fourth asks for this sequence.
        assert len(link.plans) == 3
        await link.answer(link.plans[2], 9)
        assert len(link.plans) == 3
        stats = engine.drivers[0].stats()
        assert (stats.num_discarded_tokens, stats.num_used_blocks) == (1, 0)


async def test_a_cancelled_request_is_dropped_in_the_next_plan() -> None:
    executor = ScriptedExecutor()
    async with running(executor, run_ahead=1) as engine:
        victim, other = RecordedOutput(), RecordedOutput()
        await engine.submit(make_request("victim", prompt=[1, 2]), victim)
        await engine.submit(make_request("other", prompt=[3, 4]), other)
        await settle()
        link = executor.links[0]
        seq_id = link.plans[0].new_sequences[0].seq_id
        assert engine.cancel(make_request("victim").request_id, Cancelled("by the test"))
        assert isinstance(victim.error, Cancelled)
        check_integrity(engine)
        await link.answer(link.plans[0], 9)
        assert list(link.plans[1].dropped_seq_ids) == [seq_id]
        assert victim.token_ids == [] and other.token_ids == [9]
        assert not engine.cancel(make_request("victim").request_id, Cancelled("again"))


async def test_an_id_is_free_again_after_the_end_and_only_then() -> None:
    executor = ScriptedExecutor()
    async with running(executor) as engine:
        output = RecordedOutput()
        first = await engine.submit(make_request(max_tokens=1), output)
        with pytest.raises(DuplicateRequest):
            await engine.submit(make_request(), RecordedOutput())
        await settle()
        await executor.links[0].answer(executor.links[0].plans[0], 9)
        assert output.updates[-1].finish_reason is FinishReason.LENGTH
        again = await engine.submit(make_request(), RecordedOutput())
        engine.abandon(first)  # late; must not hit the new one
        assert engine.num_open_requests == 1
        engine.abandon(again)
        assert engine.num_open_requests == 0
        assert (engine.counters.num_finished_requests, engine.counters.num_cancelled_requests) == (1, 1)


async def test_refusals_of_the_core_reach_the_caller_and_leave_nothing_behind() -> None:
    executor = ScriptedExecutor(max_num_seqs=1)
    async with running(executor, max_waiting_requests=1) as engine:
        with pytest.raises(KvPoolTooSmall):
            await engine.submit(make_request("huge", max_tokens=1000), RecordedOutput())
        await engine.submit(make_request("a"), RecordedOutput())
        await settle()
        await engine.submit(make_request("b"), RecordedOutput())
        with pytest.raises(QueueFull):
            await engine.submit(make_request("c"), RecordedOutput())
        assert engine.num_open_requests == 2


async def test_a_request_waits_no_longer_than_it_wants() -> None:
    clock = ManualClock()
    executor = ScriptedExecutor(max_num_seqs=1)
    async with running(executor, clock=clock) as engine:
        first, second = RecordedOutput(), RecordedOutput()
        await engine.submit(make_request("first", queue_deadline_s=1.0), first)
        await settle()
        await engine.submit(make_request("second", queue_deadline_s=1.0), second)
        clock.advance(2.0)
        engine.drivers[0].expire()
        assert isinstance(second.error, QueueTimeout) and first.error is None
        assert (engine.num_open_requests, engine.counters.num_failed_requests) == (1, 1)


async def test_nobody_to_run_it() -> None:
    executor = ScriptedExecutor()
    executor.problem = Unavailable("nobody is there")
    async with running(executor) as engine:
        with pytest.raises(NoExecutor, match="nobody is there"):
            await engine.submit(make_request(), RecordedOutput())
        assert engine.num_open_requests == 0


async def test_a_model_that_is_being_loaded_is_said_to_be() -> None:
    executor = ScriptedExecutor()
    executor.problem = ModelLoading("the executor is loading its model")
    async with running(executor) as engine:
        with pytest.raises(ModelLoading, match="loading its model") as caught:
            await engine.submit(make_request(), RecordedOutput())
        assert caught.value.retry_after_s is not None


async def test_draining_takes_no_more_and_is_idle_when_the_last_one_ends() -> None:
    executor = ScriptedExecutor()
    async with running(executor) as engine:
        output = RecordedOutput()
        await engine.submit(make_request(max_tokens=1), output)
        engine.begin_drain()
        with pytest.raises(Draining):
            await engine.submit(make_request("late"), RecordedOutput())
        await settle()
        await executor.links[0].answer(executor.links[0].plans[0], 9)
        await engine.wait_idle()


async def test_the_next_session_counts_from_one_and_goes_on_where_the_last_one_was() -> None:
    executor = ScriptedExecutor()
    async with running(executor) as engine:
        output = RecordedOutput()
        await engine.submit(make_request(max_tokens=4), output)
        await settle()
        first = executor.links[0]
        await first.answer(first.plans[0], 7)
        await first.say(None)
        while len(executor.links) < 2:
            await settle()
        await settle()
        second = executor.links[1]
        assert first.is_closed and executor.hellos[0] == executor.hellos[1]
        assert second.plans[0].step_id == 1
        new = second.plans[0].new_sequences[0]
        assert (unpack_token_ids(new.token_ids).tolist(), new.num_prompt_tokens, new.num_computed_tokens) == ([1, 2, 3, 7], 3, 0)
        check_integrity(engine)
        for i in range(3):
            await second.answer(second.plans[i], 8)
        assert output.token_ids == [7, 8, 8, 8] and output.is_over


async def test_without_a_successor_the_request_fails_in_the_end() -> None:
    executor = ScriptedExecutor()
    async with running(executor, executor_lost_timeout_s=0.0) as engine:
        output = RecordedOutput()
        await engine.submit(make_request(), output)
        await settle()
        executor.problem = Unavailable("nobody is there")
        await executor.links[0].say(None)
        while output.error is None:
            await settle()
        assert isinstance(output.error, ExecutorLost)


async def test_a_request_that_is_there_whenever_an_executor_dies_is_given_up() -> None:
    executor = ScriptedExecutor()
    async with running(executor) as engine:
        poison, waiting = RecordedOutput(), RecordedOutput()
        await engine.submit(make_request("poison"), poison)
        for i in range(5):
            while len(executor.links) <= i or not executor.links[i].plans:
                await settle()
            await executor.links[i].say(None)
        assert isinstance(poison.error, ExecutorLost) and "5 times" in poison.error.message
        while len(executor.links) < 6:
            await settle()
        await settle()
        await engine.submit(make_request("next", max_tokens=1), waiting)
        await settle()
        await executor.links[5].answer(executor.links[5].plans[0], 9)
        assert waiting.token_ids == [9]


async def test_an_executor_that_returns_with_other_limits_gets_the_requests_that_fit() -> None:
    executor = ScriptedExecutor()
    async with running(executor) as engine:
        small, large = RecordedOutput(), RecordedOutput()
        await engine.submit(make_request("small", prompt=[1], max_tokens=4), small)
        await engine.submit(make_request("large", prompt=[2], max_tokens=60), large)
        await settle()
        executor.info = pb.ExecutorInfo.FromString(executor.info.SerializeToString())
        executor.info.num_blocks = 4
        await executor.links[0].say(None)
        while len(executor.links) < 2:
            await settle()
        await settle()
        assert isinstance(large.error, KvPoolTooSmall) and small.error is None
        assert len(executor.links[1].plans[0].new_sequences) == 1


async def test_requests_go_where_their_prefix_is_and_elsewhere_when_it_is_busy() -> None:
    first, second = ScriptedExecutor("one"), ScriptedExecutor("two")
    async with running(first, second) as engine:
        prompt = list(range(1, 14))
        await engine.submit(make_request("a", prompt=prompt, max_tokens=1), RecordedOutput())
        await settle()
        await first.links[0].answer(first.links[0].plans[0], 9)
        await engine.submit(make_request("b", prompt=prompt), RecordedOutput())
        await engine.submit(make_request("c", prompt=[99]), RecordedOutput())
        await settle()
        assert [len(driver.generations) for driver in engine.drivers] == [1, 1]
        assert first.links[0].plans[1].new_sequences[0].num_computed_tokens == 12
