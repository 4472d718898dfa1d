"""Cores by affinity and by quota."""

import os
from pathlib import Path

import pytest

from common.cpu_cores import usable_cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cpu_max", "cores"), [("max 100000", ALL), ("100000 100000", 1), ("50000 100000", 1), ("6400000 100000", ALL), ("", ALL)]
)
def test_a_quota_below_the_affinity_counts(tmp_path: Path, cpu_max: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(cpu_max)

    assert usable_cores(tmp_path) == cores


def test_no_control_group_is_no_limit(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == ALL
