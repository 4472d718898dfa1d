"""Fresh random inputs in every run; a failure shows the seed."""

import random
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> int:
    value = random.SystemRandom().randrange(2**31)
    print(f"torch seed {value}")
    torch.manual_seed(value)
    return value


@pytest.fixture(params=[1, 2], ids=["one_thread", "two_threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
