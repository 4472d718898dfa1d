"""Times beside their neighbours': what the machine does to all of them is no difference."""

from pytest import approx

from bench.throttled import beside


def test_a_machine_that_gets_slower_all_the_time_makes_nothing_slow() -> None:
    times_s = [1.0 + 0.1 * i for i in range(9)]

    assert beside(times_s[1::2], times_s[:-1:2], times_s[2::2]) == approx([1.0] * 4)


def test_what_takes_longer_than_both_neighbours_stands_out() -> None:
    assert beside([1.2, 1.0], [1.0, 1.0], [1.0, 1.0]) == approx([1.2, 1.0])
