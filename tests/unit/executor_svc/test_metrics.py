"""What the worker counts."""

from prometheus_client import REGISTRY

from common.ids import SeqId
from executor_svc import metrics
from executor_svc.core.plan import SequenceFailure
from executor_svc.runner import StepOutcome
from executor_svc.transfer import LoadDone, SaveDone


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"octavo_executor_{name}_total", labels) or 0.0


def test_a_step_counts_its_tokens_failures_and_seconds() -> None:
    before = [value("steps"), value("tokens"), value("failed_sequences"), value("step_seconds", part="forward")]
    outcome = StepOutcome(1, [], [SequenceFailure(SeqId(1), "")], 17, prepare_s=0.1, forward_s=0.5, sample_s=0.2)

    metrics.observe_step(outcome, idle_s=0.0)

    after = [value("steps"), value("tokens"), value("failed_sequences"), value("step_seconds", part="forward")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 17, 1, 0.5]


def test_transfers_count_blocks_by_outcome() -> None:
    outcomes = ("loaded", "written", "present", "failed")
    before = [value("store_blocks", outcome=outcome) for outcome in outcomes]

    metrics.observe_transfer(LoadDone(1, num_loaded=4))
    metrics.observe_transfer(SaveDone(1, num_written=3, num_present=2, num_failed=1))

    after = [value("store_blocks", outcome=outcome) for outcome in outcomes]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 3, 2, 1]
