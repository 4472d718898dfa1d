import random

import pytest

from scheduler_svc.core.forecast.mixture import Mixture
from scheduler_svc.core.forecast.spread import Spread


def test_all_are_trusted_alike_before_the_first_outcome() -> None:
    assert Mixture(4, overlap=10).weights() == [0.25] * 4


def test_who_is_right_takes_over_and_loses_it_when_wrong() -> None:
    mixture = Mixture(2, overlap=1)
    for _ in range(100):
        mixture.learn([0.1, 1.0])
    assert mixture.weights()[0] > 0.99
    for _ in range(3000):
        mixture.learn([1.0, 0.1])
    assert mixture.weights()[1] > 0.99


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e4])
def test_the_unit_of_errors_does_not_matter(unit: float) -> None:
    mixture = Mixture(2, overlap=1)
    for _ in range(10):
        mixture.learn([unit * 0.5, unit])
    assert mixture.weights()[0] == pytest.approx(0.999, abs=0.01)


def test_outcomes_that_overlap_count_for_less() -> None:
    hasty, patient = Mixture(2, overlap=1), Mixture(2, overlap=60)
    for _ in range(60):
        for mixture in (hasty, patient):
            mixture.learn([0.5, 1.0])
    assert 0.5 < patient.weights()[0] < 0.9 < hasty.weights()[0]


@pytest.mark.parametrize("deviation", [0.3, 3.0, 300.0])
def test_sizes_of_errors_are_those_of_their_distribution(deviation: float) -> None:
    spread, rng = Spread(), random.Random(5)
    for _ in range(4000):
        spread.learn(rng.gauss(0, deviation))
    half, most = spread.sizes((0.5, 0.9))
    assert half == pytest.approx(0.674 * deviation, rel=0.15)
    assert most == pytest.approx(1.645 * deviation, rel=0.15)


def test_old_errors_are_forgotten_even_after_very_long() -> None:
    spread = Spread()
    for _ in range(20_000):  # the weight of a step starts again several times
        spread.learn(50.0)
    for _ in range(3000):
        spread.learn(1.0)
    assert spread.sizes((0.9,))[0] == pytest.approx(1.0, rel=0.2)


def test_without_errors_there_is_no_spread() -> None:
    assert Spread().sizes((0.1, 0.9)) == [0.0, 0.0]
