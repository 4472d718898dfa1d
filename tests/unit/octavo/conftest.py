"""A fake scheduler on a unix socket."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.octavo.fake_scheduler import FakeScheduler, in_thread


@dataclass
class Served:
    """A running fake and its address."""

    fake: FakeScheduler
    target: str


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    fake = FakeScheduler()
    with in_thread(fake, f"unix:{tmp_path}/s.sock") as target:
        yield Served(fake, target)
