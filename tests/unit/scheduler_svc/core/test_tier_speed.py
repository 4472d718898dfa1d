import pytest

from scheduler_svc.core.tier_speed import TierSpeed


def test_an_unknown_tier_is_expected_to_be_fast() -> None:
    speed = TierSpeed()

    assert not speed.is_known
    assert speed.seconds(1000) == 0.0


def test_latency_and_bandwidth_are_told_apart() -> None:
    speed = TierSpeed()
    speed.note(11, 0.5, 1.5)

    assert speed.seconds(0) == 0.0
    assert speed.seconds(1) == 0.5
    assert speed.seconds(101) == pytest.approx(0.5 + 100 * 0.1)


def test_a_tier_that_collapses_is_distrusted_at_once_and_trusted_again_slowly() -> None:
    speed = TierSpeed()
    speed.note(11, 0.01, 0.11)
    speed.note(11, 0.01, 100.01)
    assert speed.seconds(2) > 4.0

    speed.note(11, 0.01, 0.11)
    assert speed.seconds(2) > 2.0
    for _ in range(30):
        speed.note(11, 0.01, 0.11)
    assert speed.seconds(2) == pytest.approx(0.02, rel=0.1)


def test_a_wait_in_vain_counts_as_latency() -> None:
    speed = TierSpeed()
    speed.note(0, 0.3, 0.3)

    assert speed.seconds(1) == pytest.approx(0.3)

    speed.note(0, 0.001, 0.001)  # another one had less patience
    assert speed.seconds(1) == pytest.approx(0.3)
