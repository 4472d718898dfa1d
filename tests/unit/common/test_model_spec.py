"""What services read of a model folder without torch."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import StartupError
from common.model_spec import public_name, read_model_spec

CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 2}


def make_folder(folder: Path, config: dict[str, Any] = CONFIG, **files: object) -> Path:
    """A folder with config.json and more JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in {"config": config, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def test_bare_config_is_enough(tmp_path: Path) -> None:
    spec = read_model_spec(make_folder(tmp_path / "My_Model"))
    assert (spec.name, spec.family, spec.max_model_len, spec.vocab_size) == ("models/my_model", "llama", 64, 100)
    assert spec.eos_token_ids == {2}
    assert not spec.has_tokenizer
    assert not spec.has_chat_template
    assert spec.generation_defaults == {}


def test_generation_config_comes_first(tmp_path: Path) -> None:
    generation = {"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "do_sample": True, "pad_token_id": 0}
    spec = read_model_spec(make_folder(tmp_path, generation_config=generation))
    assert spec.eos_token_ids == {5, 6}
    assert spec.generation_defaults == {"temperature": 0.6, "top_k": 20.0}


def test_model_that_does_not_sample_is_greedy_by_default(tmp_path: Path) -> None:
    spec = read_model_spec(make_folder(tmp_path, generation_config={"do_sample": False}))
    assert spec.generation_defaults == {"temperature": 0.0}


def test_multimodal_config_is_read_inside(tmp_path: Path) -> None:
    spec = read_model_spec(make_folder(tmp_path, {"model_type": "llava", "text_config": CONFIG}))
    assert (spec.family, spec.vocab_size) == ("llama", 100)


def test_longrope_ends_at_its_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    assert read_model_spec(make_folder(tmp_path, {**CONFIG, "rope_parameters": rope})).max_model_len == 32
    old = {**CONFIG, "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 16}
    assert read_model_spec(make_folder(tmp_path, old)).max_model_len == 16
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    assert read_model_spec(make_folder(tmp_path, {**CONFIG, "rope_parameters": yarn})).max_model_len == 64


def test_chat_template_is_found_in_either_place(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, tokenizer_config={"chat_template": "inside"}, tokenizer={})
    assert read_model_spec(folder).chat_template == "inside"
    assert read_model_spec(folder).has_tokenizer
    (folder / "chat_template.jinja").write_text("beside")
    assert read_model_spec(folder).chat_template == "beside"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert read_model_spec(make_folder(tmp_path / "b", tokenizer_config={"chat_template": named})).chat_template == "plain"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("Tiny", "models/tiny"), ("models/tiny", "models/tiny"), ("org/Tiny", "models/org--tiny"), ("", "models/model")],
)
def test_public_names(name: str, wanted: str) -> None:
    assert public_name(name) == wanted


def test_snapshot_of_the_hub_cache_is_named_after_its_repository(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "models--Org--Tiny" / "snapshots" / "0123abcd")
    assert read_model_spec(folder).name == "models/org--tiny"
    assert read_model_spec(folder).name == public_name("Org/Tiny")


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no config\.json"):
        read_model_spec(tmp_path)
    with pytest.raises(StartupError, match="says no vocab_size"):
        read_model_spec(make_folder(tmp_path, {"model_type": "llama"}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"config\.json is damaged"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(StartupError, match="not an object"):
        read_model_spec(tmp_path)
