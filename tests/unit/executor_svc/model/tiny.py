"""Tiny random models of many families, and a paged run of them to compare with their own eager forward."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.load import LoadedModel
from executor_svc.model.self_check import packed_batch

BLOCK_SIZE = 16
_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large, so that attention matters to the logits and a lost key shows.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 1.5 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def config_of(class_name: str, **changes: Any) -> Any:
    """A tiny config of a transformers config class."""
    return getattr(transformers, class_name)(**{**_COMMON, **changes})


SERVED: dict[str, Any] = {
    "llama": lambda: config_of("LlamaConfig"),
    "llama3_rope": lambda: config_of(
        "LlamaConfig",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral_window": lambda: config_of("MistralConfig", sliding_window=9, head_dim=16),
    "qwen2_window": lambda: config_of("Qwen2Config", use_sliding_window=True, sliding_window=9, max_window_layers=2),
    "qwen3": lambda: config_of("Qwen3Config", head_dim=24),
    "qwen3_moe": lambda: config_of("Qwen3MoeConfig", head_dim=16, **MOE),
    "gemma2": lambda: config_of(
        "Gemma2Config", head_dim=16, sliding_window=9, attn_logit_softcapping=5.0, query_pre_attn_scalar=20
    ),
    "gemma3": lambda: config_of("Gemma3TextConfig", head_dim=16, sliding_window=9, query_pre_attn_scalar=20),
    "phi3_window": lambda: config_of("Phi3Config", sliding_window=9),
    "phi3_longrope": lambda: config_of("Phi3Config", rope_parameters=dict(_LONGROPE), original_max_position_embeddings=32),
    "gpt_oss": lambda: config_of(
        "GptOssConfig", head_dim=16, sliding_window=9, num_local_experts=8, num_experts_per_tok=2, layer_types=None
    ),
    "deepseek_v3": lambda: config_of(
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=2,
        first_k_dense_replace=1,
        moe_intermediate_size=48,
    ),
}
"""Makers of configs, by family."""

STACKED: dict[str, Any] = {
    "llama": lambda: config_of("LlamaConfig"),
    "llama_with_biases": lambda: config_of("LlamaConfig", attention_bias=True, mlp_bias=True),
    "llama_with_gelu": lambda: config_of("LlamaConfig", hidden_act="gelu_pytorch_tanh"),
    "llama_tied": lambda: config_of("LlamaConfig", tie_word_embeddings=True),
    "llama3_rope": lambda: config_of("LlamaConfig", rope_parameters=SERVED["llama3_rope"]().rope_parameters),
    "mistral": lambda: config_of("MistralConfig", sliding_window=5, head_dim=16),
    "qwen2": lambda: config_of("Qwen2Config", use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen3": lambda: config_of("Qwen3Config", head_dim=16),
    "gemma2": lambda: config_of(
        "Gemma2Config", head_dim=16, sliding_window=5, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: config_of("Gemma3TextConfig", head_dim=16, sliding_window=5, query_pre_attn_scalar=20),
    "phi3": lambda: config_of("Phi3Config", sliding_window=5),
    "phi3_partial": lambda: config_of(
        "Phi3Config", rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    ),
}
"""Makers of configs of the forms that become one stack on a GPU; heads have 16 dimensions."""


def disturb_vectors(model: torch.nn.Module) -> None:
    """Moves norms' weights and biases away from what they are initialised with, where a mistake would not show."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.data.add_(noise, alpha=0.3)


def save_config(config: Any, folder: Path) -> Path:
    """A model folder with a config and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return folder


def paged_logits(model: LoadedModel, backend: Any, token_ids: Sequence[Tensor], chunks: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits float32 [len, vocab_size] of each sequence, computed packed and in chunks through a paged cache.

    Args:
        model: loaded.
        backend: of attention.
        token_ids: int64 [len] of each sequence.
        chunks: per step, the number of tokens of each sequence; 0: it rests.
    """
    blocks = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[blocks.pop() for _ in range(-(-len(ids) // BLOCK_SIZE))] for ids in token_ids]
    caches = {
        spec.layer_idx: LayerCache(
            key=torch.full((64, spec.num_kv_heads, spec.head_dim_k, BLOCK_SIZE), 1e4, dtype=model.dtype),
            value=torch.full((64, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim_v), 1e4, dtype=model.dtype),
        )
        for spec in model.layer_specs
    }
    computed = [0] * len(token_ids)
    logits: list[list[Tensor]] = [[] for _ in token_ids]
    for step in chunks:
        parts = [(seq, computed[seq], computed[seq] + num) for seq, num in enumerate(step) if num]
        parts.sort(key=lambda part: part[2] - part[1] != 1)
        lens = [end - start for _, start, end in parts]
        batch = packed_batch(parts, tables, block_size=BLOCK_SIZE)
        known_lens = torch.tensor([len(token_ids[seq]) for seq, _, _ in parts])
        with torch.inference_mode():
            out = model.compute_logits(
                ForwardContext(batch, backend, caches, known_lens),
                torch.cat([token_ids[seq][start:end] for seq, start, end in parts]),
                torch.cat([torch.arange(start, end) for _, start, end in parts]),
                torch.arange(sum(lens)),
            )
        for (seq, _, end), rows in zip(parts, torch.split(out, lens), strict=True):
            logits[seq].append(rows)
            computed[seq] = end
    return [torch.cat(rows) for rows in logits]
