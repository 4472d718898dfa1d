"""Sampling parameters as columns: random numbers are those of the CPU, and only what rows ask for is computed."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.core.sampling import SamplingParams, uniform_draw
from executor_svc.cuda.rows import RowTable, uniform_draws

GREEDY = SamplingParams(temperature=0.0)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=5))
def test_numbers_are_those_of_one_row_after_the_other(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = zip(*pairs, strict=True)

    found = uniform_draws(np.array(seeds, np.uint64), np.array(positions, np.int64))

    assert found.tolist() == [uniform_draw(seed, position) for seed, position in pairs]


def test_greedy_rows_draw_nothing() -> None:
    table = RowTable(4)
    table.set(1, GREEDY, num_given=5, num_prompt=3)
    rows = np.array([1])

    assert table.are_plain(rows)
    assert table.draw_columns(rows, np.array([6])) is None


def test_a_row_that_draws_gets_the_number_of_its_output_position() -> None:
    table = RowTable(4)
    table.set(0, GREEDY, num_given=5, num_prompt=3)
    table.set(2, replace(GREEDY, temperature=0.5, top_k=7, top_p=0.25, seed=11), num_given=5, num_prompt=3)

    columns = table.draw_columns(np.array([2, 0]), np.array([9, 9]))

    assert columns is not None
    assert columns.temperature.tolist() == [0.5, 0.0]
    assert columns.top_k.tolist() == [7, 0]
    assert columns.uniform[0] == uniform_draw(11, 6)


def test_rows_say_what_they_need() -> None:
    table = RowTable(4)
    for row, params in enumerate(
        [GREEDY, replace(GREEDY, presence_penalty=0.5), replace(GREEDY, num_logprobs=0), replace(GREEDY, logit_bias={1: 2.0})]
    ):
        table.set(row, params, num_given=1, num_prompt=1)

    assert [table.are_plain(np.array([row])) for row in range(4)] == [True, False, False, False]
    assert [table.need_history(np.array([row])) for row in range(4)] == [False, True, False, False]
