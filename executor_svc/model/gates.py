"""Models that would pass a short check and be wrong later, told from their config alone. Knows configs, loads nothing.

What shows in a few tokens is left to the self-check; here is only what a short sequence cannot show.
"""

from collections.abc import Mapping
from typing import Any

from common.errors import ModelRefused

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_INDEXER_ATTRIBUTES = ("index_topk", "index_n_heads", "index_head_dim")
_RECURRENT_ATTRIBUTES = ("ssm_state_size", "mamba_d_state", "mamba_expand", "linear_num_key_heads", "state_size")


def default_max_model_len(config: Any) -> int:
    """Longest context that is served unless asked otherwise.

    It is the model's own, except for rope type "longrope", whose frequencies change with the sequence's length: there it ends
    where the first set of frequencies ends, so that a block's content never depends on how long its sequence becomes. (Type
    "dynamic" changes beyond the model's own context only, which is never served.)
    """
    text = config.get_text_config()
    longest = int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2048)
    for rope in rope_parameters(text):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original:
            longest = min(longest, int(original))
    return longest


def rope_parameters(text_config: Any) -> list[Mapping[str, Any]]:
    """The rope settings of a text config: one, or one per layer type, or none."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested if nested else [rope]


def check_config(config: Any, max_model_len: int) -> None:
    """Refuses what can be told to be wrong.

    Args:
        config: a transformers config.
        max_model_len: longest sequence that will be served.

    Raises:
        ModelRefused: with the reason.
    """
    text = config.get_text_config()
    family = text.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{family} is an encoder-decoder model; only decoders are served")
    for architecture in getattr(config, "architectures", None) or []:
        if architecture.endswith(("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification")):
            raise ModelRefused(f"{family} is not a causal language model: its architecture is {architecture}")
    chunk = getattr(text, "attention_chunk_size", None)
    layer_types = set(getattr(text, "layer_types", None) or ())
    if chunk and max_model_len > chunk and (not layer_types or "chunked_attention" in layer_types):
        raise ModelRefused(
            f"{family} attends in chunks of {chunk} tokens, which paged attention does not do, so it would be wrong beyond "
            f"its chunk: serve it with a max_model_len of at most {chunk} instead of {max_model_len}"
        )
    unknown = sorted(layer_types - _SERVED_LAYER_TYPES - ({"chunked_attention"} if chunk else set()))
    if unknown:
        raise ModelRefused(f"{family} has layers of type {', '.join(unknown)}; only full and sliding attention are served")
    for name in _INDEXER_ATTRIBUTES:
        if getattr(text, name, None):
            raise ModelRefused(f"{family} chooses its keys with an indexer ({name}), which paged attention does not do")
    for name in _RECURRENT_ATTRIBUTES:
        if getattr(text, name, None):
            raise ModelRefused(f"{family} has recurrent layers ({name}); only attention layers can be paged")
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", None) == "alibi":
        raise ModelRefused(f"{family} puts positions into the attention mask (alibi), which paged attention does not have")
    floor_scale = getattr(text, "floor_scale", None)
    if getattr(text, "attn_temperature_tuning", False) and floor_scale and max_model_len >= floor_scale:
        raise ModelRefused(
            f"{family} tunes attention by the position in the batch from {floor_scale} tokens on: serve it with a max_model_len "
            f"below {floor_scale} instead of {max_model_len}"
        )
