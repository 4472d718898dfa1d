"""A store for each test, or one with flags of the test's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.integration.kvstore_svc.store_process import StoreProcess


@pytest.fixture
def start_store(tmp_path: Path) -> Iterator[Callable[..., StoreProcess]]:
    with ExitStack() as stack:
        yield lambda *flags: stack.enter_context(closing(StoreProcess(tmp_path, *flags)))


@pytest.fixture
def store(start_store: Callable[..., StoreProcess]) -> StoreProcess:
    return start_store()
