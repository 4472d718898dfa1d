"""What a start knows of a model before transformers is imported."""

from pathlib import Path
from typing import Any

import pytest

from executor_svc.cuda.early import early_work, heads_of
from executor_svc.settings import ExecutorSettings
from tests.unit.executor_svc.model.tiny import SERVED


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, (32, 8, 128)),
        ({"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024, "head_dim": 128}, (16, 8, 128)),
        ({"num_attention_heads": 12, "num_key_value_heads": None, "hidden_size": 768}, (12, 12, 64)),
        ({"text_config": {"num_attention_heads": 12}}, None),
        ({"num_attention_heads": 12}, None),
    ],
)
def test_heads_are_those_that_the_config_says(config: dict[str, Any], heads: tuple[int, int, int] | None) -> None:
    assert heads_of(config) == heads


@pytest.mark.parametrize("family", ["llama", "qwen2_window"])
def test_heads_of_a_saved_config_are_the_models(family: str, tmp_path: Path) -> None:
    config = SERVED[family]()
    assert heads_of(config.to_diff_dict() | config.to_dict()) == (4, 2, 16)


def test_on_a_cpu_nothing_is_planned(tmp_path: Path) -> None:
    early_work(ExecutorSettings(device="cpu", model="x"), tmp_path)()  # does not even look for config.json
