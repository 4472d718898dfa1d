"""KV goes to a real block store and comes back: the same tokens, and a store that is gone is a miss."""

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from common.block_hash import chain_keys, root_key
from common.ids import BlockId, BlockKey, SeqId
from common.patience import Patience
from executor_svc.clients.kvstore import BlockStoreClient
from executor_svc.core.plan import Chunk, NewSequence, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.engine import Engine
from executor_svc.transfer import Load, LoadDone, Save, SaveDone, TransferThread
from tests.integration.executor_svc.processes import ServiceProcess, running
from tests.unit.executor_svc.tiny_engine import make_engine

PROMPT = list(range(3, 24))
FULL_BLOCKS = 5


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("store")
    flags = ["--shm-socket", f"{folder}/shm.sock", "--capacity-bytes", str(16 << 20), "--slab-bytes", str(8 << 20)]
    flags += ["--disk-dir", f"{folder}/disk"]
    with running("kvstore_svc", folder, flags, name="kvstore") as process:
        process.wait_serving()
        yield process


@dataclass
class Rig:
    """An engine, its transfers and their outcomes."""

    engine: Engine
    transfers: TransferThread
    outcomes: "queue.Queue[LoadDone | SaveDone]"

    def tokens(self, block_ids: list[int], num_computed: int) -> list[int]:
        """Greedy tokens of PROMPT on these blocks, of which num_computed tokens are there."""
        runner = self.engine.runner
        runner.reset()
        new = NewSequence(
            SeqId(1), PROMPT, len(PROMPT), num_computed, [BlockId(i) for i in block_ids], SamplingParams(temperature=0.0)
        )
        steps = [StepPlan(1, new_sequences=[new], chunks=[Chunk(SeqId(1), len(PROMPT) - num_computed)])]
        steps += [StepPlan(step, chunks=[Chunk(SeqId(1), 1)]) for step in range(2, 7)]
        outcomes = [runner.execute(step) for step in steps]
        assert not [outcome.failures for outcome in outcomes if outcome.failures]
        return [outcome.sampled[0].token_id for outcome in outcomes]

    def keyed(self, block_ids: list[int]) -> list[tuple[BlockKey, BlockId]]:
        """The full blocks of PROMPT and their keys."""
        keys = chain_keys(root_key(self.engine.info.kv_fingerprint), PROMPT, self.engine.pool.block_size)
        return list(zip(keys, [BlockId(i) for i in block_ids], strict=True))

    def save(self, block_ids: list[int]) -> SaveDone:
        self.transfers.submit(1, Save(1, self.keyed(block_ids)))
        done = self.outcomes.get(timeout=20)
        assert isinstance(done, SaveDone)
        return done

    def load(self, block_ids: list[int]) -> LoadDone:
        self.transfers.submit(1, Load(2, self.keyed(block_ids), Patience(10.0)))
        done = self.outcomes.get(timeout=20)
        assert isinstance(done, LoadDone)
        return done


def make_rig(folder: Path, store_target: str, transport: Literal["auto", "shm", "inline"] = "auto", seed: int = 0) -> Rig:
    engine = make_engine(folder, kvstore=store_target, kv_transport=transport, seed=seed)
    outcomes: queue.Queue[LoadDone | SaveDone] = queue.Queue()
    transfers = TransferThread(engine.blocks, engine.store, lambda session, done: outcomes.put(done))
    transfers.start_session(1)
    return Rig(engine, transfers, outcomes)


def close(rig: Rig) -> None:
    rig.transfers.stop()
    assert isinstance(rig.engine.store, BlockStoreClient)
    rig.engine.store.close()


@pytest.mark.parametrize("transport", ["shm", "inline"])
def test_kv_that_was_saved_and_loaded_gives_the_same_tokens(
    store: ServiceProcess, tmp_path: Path, transport: Literal["shm", "inline"]
) -> None:
    """The pool is cleared in between, and the blocks come back elsewhere in it."""
    rig = make_rig(tmp_path, store.target, transport, seed=11 if transport == "shm" else 12)
    assert rig.engine.info.kv_transport == transport
    expected = rig.tokens([0, 1, 2, 3, 4, 5, 6], 0)

    saved = rig.save([0, 1, 2, 3, 4])
    rig.engine.pool.zero()
    loaded = rig.load([20, 31, 22, 33, 24])

    assert (saved.num_written, saved.num_present, saved.num_failed) == (FULL_BLOCKS, 0, 0)
    assert (loaded.num_loaded, loaded.num_by_tier, loaded.reason) == (FULL_BLOCKS, {"shm": FULL_BLOCKS}, "")
    assert rig.tokens([20, 31, 22, 33, 24, 40, 41], 20) == expected
    assert rig.save([20, 31, 22, 33, 24]).num_present == FULL_BLOCKS
    close(rig)


def test_blocks_of_another_model_are_never_loaded(store: ServiceProcess, tmp_path: Path) -> None:
    first = make_rig(tmp_path, store.target, seed=21)
    first.tokens([0, 1, 2, 3, 4, 5, 6], 0)
    first.save([0, 1, 2, 3, 4])
    close(first)
    second = make_rig(tmp_path, store.target, seed=22)

    assert second.load([0, 1, 2, 3, 4]).num_loaded == 0
    close(second)


def test_a_store_that_is_not_there_is_a_miss_with_a_reason(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, f"unix:{tmp_path}/nobody.sock")

    saved, loaded = rig.save([0, 1, 2, 3, 4]), rig.load([0, 1, 2, 3, 4])

    assert (saved.num_written, saved.num_failed) == (0, FULL_BLOCKS)
    assert loaded.num_loaded == 0
    assert saved.reason
    assert loaded.reason
    close(rig)
