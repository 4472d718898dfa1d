"""Small tokenizers of the two great kinds, and a model folder with one of them, so that tests need no download."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
EOS_ID = 257
BYTE_VOCAB_SIZE = 300


def byte_level() -> Tokenizer:
    """Ids 0..255 are single bytes in the order of the alphabet, 256 <s>, 257 </s>, 258.. a few merged tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "w"),
        ("Ã", "©"),
        ("Ġ", "hello"),
        ("s", "t"),
        ("st", "o"),
    ]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool→>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As of Llama 2: spaces spelled ▁, unknown characters as <0x..> tokens, one leading space stripped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "▁a", "▁b", "ab", "▁▁", "é", "日", ".", "▁the"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b"), ("a", "b")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_model_folder(folder: Path) -> Path:
    """A folder as executors prepare it, with the byte-level tokenizer and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "vocab_size": BYTE_VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": EOS_ID}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    byte_level().save(str(folder / "tokenizer.json"))
    return folder
