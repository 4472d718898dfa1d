"""Start-up of a tiny executor: what it says of itself, and which setting it names when it cannot."""

from pathlib import Path

import pytest

from common.errors import StartupError
from tests.unit.executor_svc.tiny_engine import make_engine


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_memory_bytes": 100, "num_blocks": 0}, "raise --kv-memory-bytes"),
        ({"num_blocks": 1 << 40}, "lower --kv-memory-bytes or --num-blocks"),
        ({"max_model_len": 257}, "max_model_len: 257"),
        ({"block_size": 1, "num_blocks": 2}, "leave no room for a single step"),
        ({"kv_dtype": "fp8_e4m3"}, "kv_dtype: fp8_e4m3 needs a GPU"),
        ({"kv_stored_form": "int8"}, "kv_stored_form: int8 is made on a GPU"),
        ({"kv_stored_form": "fp8_e4m3"}, "kv_stored_form: fp8_e4m3 is made on a GPU"),
    ],
)
def test_a_start_that_cannot_work_names_the_setting(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        make_engine(tmp_path, **changes)


def test_kv_memory_decides_the_number_of_blocks(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_blocks=0, kv_memory_bytes=1_000_000)

    assert engine.pool.num_blocks == 1_000_000 // engine.pool.block_bytes
    assert engine.info.memory_bytes["kv_pool"] == engine.pool.num_bytes
    engine.pool.check_integrity()


def test_the_fingerprint_changes_with_whatever_changes_a_blocks_bytes(tmp_path: Path) -> None:
    fingerprints = [
        make_engine(tmp_path, **changes).info.kv_fingerprint
        for changes in ({}, {"num_blocks": 32}, {"seed": 1}, {"block_size": 8}, {"dtype": "bfloat16"}, {"quantization": "int8"})
    ]

    assert fingerprints[0] == fingerprints[1], "the size of the pool changes no block"
    assert len(set(fingerprints[1:])) == 5


def test_the_model_is_named_after_its_folder_unless_told(tmp_path: Path) -> None:
    assert make_engine(tmp_path / "Tiny-Llama").info.model == "models/tiny-llama"
    assert make_engine(tmp_path / "b", model_name="models/b2").info.model == "models/b2"
