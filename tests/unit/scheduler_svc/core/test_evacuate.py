from dataclasses import replace

from common.ids import RequestId
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.core.scheduler import Scheduler
from tests.unit.scheduler_svc.core.rig import ROOT, make_config

PROMPT = (1, 2, 3, 4, 5)


def request(name: str, *, n: int = 1) -> Request:
    sampling, stop = SamplingParams(seed=7), StopConditions(10)
    return Request(RequestId(name), PROMPT, sampling, stop, ROOT, arrival_s=0.0, n=n, queue_deadline_s=1.0)


def test_another_scheduler_goes_on_where_this_one_was() -> None:
    source, target = Scheduler(make_config()), Scheduler(make_config())
    first, _ = source.add(request("running", n=2))
    plan = source.schedule(0.0)
    assert plan is not None
    sampled = {chunk.seq_id: 50 for chunk in plan.chunks}
    while len(sampled) < 2:  # the second sample shares the first one's prompt and starts a step later
        source.apply(plan.step_id, sampled, {})
        plan = source.schedule(0.0)
        assert plan is not None
        sampled = {chunk.seq_id: 51 for chunk in plan.chunks}
    source.apply(plan.step_id, sampled, {})
    source.finish_sequence(first)
    waiting = request("waiting")
    source.add(waiting)

    moved = source.evacuate()
    assert not source.has_work
    source.check_integrity()
    assert [r.request_id for r in moved] == ["running", "waiting"]
    assert moved[0].generated == (None, (51,)) and moved[0].queue_deadline_s is None
    assert moved[1] == replace(waiting, generated=((),))

    assert len(target.add(moved[0])) == 1
    target.check_integrity()
    plan = target.schedule(5.0)
    assert plan is not None
    new = plan.new_sequences[0]
    assert (new.token_ids, new.num_prompt_tokens) == ((*PROMPT, 51), len(PROMPT))
    assert new.sampling.seed == 8  # the second sample's
    updates = target.apply(plan.step_id, {new.seq_id: 52}, {})
    assert [(update.index, update.token_ids) for update in updates] == [(1, (52,))]
    assert target.evacuate()[0].generated == (None, (51, 52))
    target.check_integrity()
