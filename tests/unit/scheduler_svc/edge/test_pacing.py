"""Many streams share a budget of messages; one stream gets every token at once."""

import pytest

from scheduler_svc.edge.pacing import MAX_INTERVAL_S, MESSAGES_PER_CORE_BESIDE_S, MESSAGES_PER_CORE_S, Pacing, stream_phase


def test_a_single_stream_is_not_held_back() -> None:
    assert Pacing(1).message_interval_s(1) == 0.0
    assert Pacing(1).message_interval_s(0) == 0.0


@pytest.mark.parametrize("num_cores", [1, 2, 16])
@pytest.mark.parametrize("per_core_s", [MESSAGES_PER_CORE_S, MESSAGES_PER_CORE_BESIDE_S])
def test_all_streams_together_stay_within_the_budget_of_the_machine(num_cores: int, per_core_s: int) -> None:
    pacing = Pacing(num_cores, per_core_s)
    for num_streams in (2, 3, 6):
        assert (num_streams - 1) / pacing.message_interval_s(num_streams) <= per_core_s * num_cores * 1.001


def test_no_reader_waits_long() -> None:
    assert Pacing(1).message_interval_s(10_000) == MAX_INTERVAL_S


def test_streams_that_begin_together_are_spread_over_the_interval() -> None:
    for first in (0, 1000):
        phases = sorted(stream_phase(first + i) for i in range(100))
        gaps = [b - a for a, b in zip(phases, [*phases[1:], phases[0] + 1.0], strict=True)]
        assert max(gaps) < 0.03
