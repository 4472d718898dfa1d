"""Who gets what a step brought, and who has to end because of it."""

from common.clock import ManualClock
from common.errors import OctavoError
from common.ids import RequestId, SeqId
from octavo.types.v1.types_pb2 import PositionLogprobs
from scheduler_svc.core.plan import SampleId
from scheduler_svc.core.request import FinishReason, Request, SamplingParams, StopConditions
from scheduler_svc.core.updates import StepUpdates
from scheduler_svc.generation import Generation
from scheduler_svc.residents import Residents
from tests.unit.scheduler_svc.core.rig import ROOT
from tests.unit.scheduler_svc.scripted_executor import RecordedOutput


class Host:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.ended: list[tuple[Generation, OctavoError | None]] = []
        self.ended_samples: list[SeqId] = []

    def end(self, generation: Generation, error: OctavoError | None) -> None:
        self.ended.append((generation, error))

    def end_sample(self, seq_id: SeqId) -> None:
        self.ended_samples.append(seq_id)

    def expire(self) -> None:
        raise AssertionError("nobody has a deadline")


def make(name: str, seq_ids: list[int], output: RecordedOutput, num_logprobs: int | None = None) -> Generation:
    sampling, stop = SamplingParams(num_logprobs=num_logprobs), StopConditions(9)
    generation = Generation(Request(RequestId(name), (1,), sampling, stop, ROOT, 0.0, n=len(seq_ids)), output)
    generation.seq_ids = tuple(map(SeqId, seq_ids))
    return generation


def sample(name: str, seq_id: int, index: int = 0) -> SampleId:
    return SampleId(RequestId(name), SeqId(seq_id), index)


def test_tokens_ends_and_failures_reach_their_outputs() -> None:
    host, outputs = Host(), [RecordedOutput() for _ in range(3)]
    residents = Residents(host, ManualClock())
    generations = [make(f"r{i}", [i], output) for i, output in enumerate(outputs)]
    for generation in generations:
        residents.add(generation)
    updates = StepUpdates()
    updates.samples, updates.token_ids = [sample("r0", 0), sample("r1", 1), sample("gone", 9)], [5, 6, 7]
    last = updates.update_of(updates.samples[1], 6)
    last.finish_reason = FinishReason.STOP
    updates.ended[SeqId(1)] = last
    failed = updates.update_of(sample("r2", 2), 0)
    failed.token_ids, failed.finish_reason = (), FinishReason.ERROR
    updates.failed.append(failed)

    residents.deliver(updates, {})

    assert [output.token_ids for output in outputs] == [[5], [6], []]
    reasons = [update.finish_reason for output in outputs for update in output.updates]
    assert reasons == [None, FinishReason.STOP, FinishReason.ERROR]
    assert host.ended == [(generations[1], None), (generations[2], None)]
    assert generations[0].first_token_at_s is not None and generations[2].first_token_at_s is None


def test_a_sample_that_ends_by_its_text_ends_alone() -> None:
    host = Host()
    residents = Residents(host, ManualClock())
    residents.add(make("r", [1, 2], RecordedOutput(2, end_after=1)))
    updates = StepUpdates()
    updates.samples, updates.token_ids = [sample("r", 1, 0)], [5]
    residents.deliver(updates, {})
    assert (host.ended, host.ended_samples) == ([], [1])


def test_log_probabilities_go_with_their_tokens() -> None:
    residents, logprobs = Residents(Host(), ManualClock()), PositionLogprobs()
    seen: list[tuple[int, int]] = []

    class Output(RecordedOutput):
        def push(self, update, logprobs) -> None:  # type: ignore[no-untyped-def]
            seen.append((update.token_ids[0], len(logprobs)))

    plain, rich = make("plain", [1], Output()), make("rich", [2], Output(), num_logprobs=0)
    residents.add(plain)
    assert not residents.want_logprobs
    residents.add(rich)
    assert residents.want_logprobs
    updates = StepUpdates()
    updates.samples, updates.token_ids = [sample("plain", 1), sample("rich", 2)], [5, 6]
    residents.deliver(updates, {SeqId(2): [logprobs]})
    assert seen == [(5, 0), (6, 1)]
    residents.remove(rich)
    assert not residents.want_logprobs
