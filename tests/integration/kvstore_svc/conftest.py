"""A store for each test, one with flags of the test's own, or one that many tests share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.store_process import StoreProcess, wait_until


@pytest.fixture
def start_store(tmp_path: Path) -> Iterator[Callable[..., StoreProcess]]:
    with ExitStack() as stack:
        yield lambda *flags: stack.enter_context(closing(StoreProcess(tmp_path, *flags)))


@pytest.fixture
def store(start_store: Callable[..., StoreProcess]) -> StoreProcess:
    return start_store()


@pytest.fixture(scope="module")
def process_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with closing(StoreProcess(tmp_path_factory.mktemp("store"))) as store:
        yield store


@pytest.fixture
def empty_store(process_of_module: StoreProcess) -> StoreProcess:
    """Without blocks, but with the counters of the tests before. What a client holds that is just going would stay."""
    wait_until(lambda: not any(session.num_leases for session in process_of_module.stats().sessions))
    process_of_module.stub.ClearBlocks(pb.ClearBlocksRequest(), timeout=10)
    return process_of_module
