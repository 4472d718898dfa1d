"""How many edge processes there are."""

import pytest

from scheduler_svc.edge_wiring import num_edge_processes


@pytest.mark.parametrize(("num_cores", "expected"), [(1, 0), (2, 0), (7, 0), (8, 1), (16, 2), (32, 4), (256, 4)])
def test_few_cores_have_none_and_many_have_some(num_cores: int, expected: int) -> None:
    assert num_edge_processes(None, num_cores) == expected


@pytest.mark.parametrize("asked", [0, 1, 9])
def test_the_operator_decides(asked: int) -> None:
    assert num_edge_processes(asked, 1) == num_edge_processes(asked, 64) == asked
