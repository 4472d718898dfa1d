"""Ratios say the same whether less or more is better."""

import pytest

from bench.comparison import compare
from bench.figures import Figures
from bench.gpu_cases import Sizes, cases, percentile
from bench.gpu_measure import chosen, wanted_cases
from bench.in_process import covered_share


def test_less_time_and_more_tokens_are_both_ahead() -> None:
    figures = Figures()
    figures.add("decode 32", "step", [5.0, 5.4], "ms", "octavo", model="llama-8b")
    figures.add("mixed", "output", [4915.0], "tokens/s", "octavo", model="llama-8b")

    decode, mixed = compare(figures)

    assert decode.octavo == 5.2 and decode.vllm == 6.41
    assert decode.times == pytest.approx(6.41 / 5.2)
    assert mixed.times == pytest.approx(0.5)
    assert decode.as_row()["ahead"] is True and mixed.as_row()["ahead"] is False


def test_the_split_costs_what_the_engine_in_one_process_is_faster() -> None:
    figures = Figures()
    for peer, step, rate in (("octavo", 5.0, 970.0), ("in process", 4.0, 1000.0)):
        figures.add("decode 32", "step", [step], "ms", peer, model="tiny")
        figures.add("mixed", "output", [rate], "tokens/s", peer, model="tiny")

    decode, mixed = compare(figures)

    assert decode.split_cost == pytest.approx(0.2)
    assert mixed.split_cost == pytest.approx(0.03)
    assert decode.vllm is None and decode.times is None


def test_workloads_are_chosen_by_name_or_by_its_first_words() -> None:
    names = wanted_cases(cases(Sizes()), ("mixed", "decode 3", "prefill 1 x 8192", "decode", "decode 32"))

    assert names == ["mixed", "prefill 1 x 8192", "decode 1", "decode 8", "decode 32", "decode 128", "decode 256"]
    assert not chosen("decode 32", ("decode 3",))


def test_percentiles_lie_between_values() -> None:
    assert percentile([1.0], 99) == 1.0
    assert percentile([float(i) for i in range(101)], 99) == 99.0
    assert percentile([1.0, 3.0], 50) == 2.0


def test_overlapping_spans_count_once() -> None:
    assert covered_share([(0.0, 2.0), (1.0, 3.0), (1.5, 2.0), (4.0, 10.0)]) == pytest.approx(0.9)
