"""What steps say of sequences that share a prompt, kernel by kernel and in the memory of graphs."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine, build_engine
from executor_svc.kernels.batch import AttentionBatch
from executor_svc.settings import ExecutorSettings
from tests.unit.executor_svc.cuda.host_queue import HostQueue, PaddedBackend, queued
from tests.unit.executor_svc.cuda.shared_prompt import NUM_SEQS, SETTINGS, tokens_of
from tests.unit.executor_svc.model.tiny import config_of, save_config


class Witness(PaddedBackend):
    """Plain attention that holds what is said to be shared against the block tables.

    Attributes:
        seen: tokens and members of each group of each call.
    """

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, int]]] = []

    def paged_attention(self, query: Tensor, key: Tensor, value: Tensor, layer_cache: Any, batch: Any, **options: Any) -> Tensor:
        assert isinstance(batch, AttentionBatch)
        if batch.shared is not None:
            self.seen.append([])
            begin, unshared = 0, set(range(batch.num_decodes))
            for length, end in zip(batch.shared.group_lens.tolist(), batch.shared.group_ends.tolist(), strict=True):
                members = batch.shared.members[begin:end].tolist()
                if members:
                    self.seen[-1].append((length, len(members)))
                    tables = batch.block_tables[members, : -(-length // batch.block_size)]
                    assert (tables == tables[0]).all() and (batch.seq_lens[members] > length).all()
                    assert (batch.shared.own_starts[members] == length).all()
                begin, unshared = end, unshared - set(members)
            assert not batch.shared.own_starts[list(unshared)].any()
        return super().paged_attention(query, key, value, layer_cache, batch, **options)


def make_engine(folder: Path) -> Engine:
    values = {"model": str(folder), "backend": "torch", "load_format": "random", "dtype": "float32", "num_threads": 1}
    return build_engine(ExecutorSettings.model_validate({**values, **SETTINGS}), folder, lambda text: None)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_decodes_are_said_to_share_what_they_share(graphs: bool, tmp_path: Path) -> None:
    folder = save_config(config_of("LlamaConfig", max_position_embeddings=1024), tmp_path / "llama")
    expected = tokens_of(queued(make_engine(folder), HostQueue()), 2)
    witness = Witness()
    engine = queued(make_engine(folder), HostQueue(), graphs=graphs, backend=witness)
    assert isinstance(engine.runner, CudaRunner)
    witness.seen.clear()

    assert tokens_of(engine, 2) == expected
    assert {tuple(groups) for groups in witness.seen} == {((768, NUM_SEQS),)}
