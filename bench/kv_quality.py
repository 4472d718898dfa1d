"""What smaller keys and values gain in bytes and cost in quality: logits over a rounded cache, beside those over an exact one.

    python -m bench.kv_quality [MODEL]

The model computes in float32 on the CPU, teacher-forced over a text, and every token sees all keys and values rounded as the form
says, its own included. So the figures are those of the format alone, and the same for whatever device reads it. Forms: the pool's
(kernels/e4m3.py), with an exponent per token and head; stored ones (kvcache/stored_form.py), with a scale per block and head; and
what a bfloat16 pool rounds away.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.figures import Figures
from bench.int8_agreement import TEXT
from executor_svc.kernels import e4m3
from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary
from executor_svc.kernels.reference import rotate
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.kvcache.pool import KvPool, KvShape, block_bytes
from executor_svc.kvcache.stored_form import FORMS, StoredForm, compress, restore, stored_layout
from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.load import LoadedModel, load_model, no_rewrites
from executor_svc.model.prepare import DEFAULT_CACHE_DIR, DEFAULT_MODEL, prepare_model

BLOCK_SIZE = 16
Rounding = Callable[[Tensor], Tensor]
"""Keys or values [num_tokens, num_kv_heads, head_dim] of whole blocks, rounded; float32."""


class RoundedBackend(TorchBackend):
    """Attention over rounded keys and values."""

    def __init__(self, rounding: Rounding):
        self._rounding = rounding

    def paged_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_cache: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See Backend.paged_attention; the batch is one sequence from its first token on."""
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        key, value = self._rounding(key), self._rounding(value)
        return super().paged_attention(
            query, key, value, layer_cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
        )


def pool_rounding(rows: Tensor) -> Tensor:
    """As a pool of e4m3 keeps them."""
    return e4m3.decode(*e4m3.encode(rows))


def stored_rounding(form: StoredForm) -> Rounding:
    """As blocks of a bfloat16 pool are after they were stored."""

    def rounded(rows: Tensor) -> Tensor:
        num_tokens, num_heads, head_dim = rows.shape
        # A head's tokens of one block are one "head" of one value per token and dimension.
        heads = rows.bfloat16().view(-1, BLOCK_SIZE, num_heads, head_dim).transpose(1, 2).contiguous()
        layout = replace(stored_layout([_Layer(1, head_dim)], BLOCK_SIZE, torch.bfloat16), native_bytes=2 * BLOCK_SIZE * head_dim)
        layout = replace(layout, heads=layout.heads[:1])
        blocks = heads.view(-1, BLOCK_SIZE * head_dim).view(torch.uint8)
        found = restore(compress(blocks, form, layout), form, layout).view(torch.bfloat16)
        return found.view(-1, num_heads, BLOCK_SIZE, head_dim).transpose(1, 2).reshape(num_tokens, num_heads, head_dim).float()

    return rounded


@dataclass(frozen=True)
class _Layer:
    """As kvcache.pool wants a layer whose keys and values are alike."""

    num_kv_heads: int
    head_dim_k: int

    @property
    def head_dim_v(self) -> int:
        return self.head_dim_k


def bytes_of_blocks(layers: Sequence[KvShape]) -> dict[str, int]:
    """Of one block in each form, by the names of main."""
    return {
        "pool bfloat16": block_bytes(layers, BLOCK_SIZE, torch.bfloat16),
        "pool fp8_e4m3": block_bytes(layers, BLOCK_SIZE, e4m3.E4M3),
        **{f"stored {name}": stored_layout(layers, BLOCK_SIZE, torch.bfloat16).stored_bytes for name in FORMS},
    }


@torch.inference_mode()
def logits(model: LoadedModel, token_ids: Tensor, rounding: Rounding) -> Tensor:
    """Float32 [num_tokens, vocab_size]."""
    count = token_ids.shape[0]
    pool = KvPool(model.layer_specs, count // BLOCK_SIZE, BLOCK_SIZE, model.dtype)
    caches = {spec.layer_idx: cache for spec, cache in zip(model.layer_specs, pool.layer_caches, strict=True)}
    batch = AttentionBatch(
        slot_mapping=torch.arange(count),
        block_tables=torch.arange(count // BLOCK_SIZE, dtype=torch.int32)[None],
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        num_decodes=0,
        max_seqlen_q=count,
        max_seqlen_k=count,
        block_size=BLOCK_SIZE,
    )
    at = torch.arange(count)
    return model.compute_logits(ForwardContext(batch, RoundedBackend(rounding), caches), token_ids, at, at)


def add_quality(figures: Figures, name: str, exact: Tensor, found: Tensor) -> None:
    """Error of logits, divergence of distributions, share of equal greedy tokens."""
    error = (found - exact).abs().amax(1) / exact.abs().amax(1)
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(1).double(), exact.log_softmax(1).double(), reduction="none", log_target=True
    ).sum(1)
    equal = (found.argmax(1) == exact.argmax(1)).double().mean()
    figures.add(name, "logit error, median of positions", 100 * float(error.median()), "% of the largest logit", "octavo")
    figures.add(name, "logit error, largest", 100 * float(error.max()), "% of the largest logit", "octavo")
    figures.add(name, "divergence, mean", 1e3 * float(divergence.mean()), "milli-nats", "octavo")
    figures.add(name, f"greedy token equal, {exact.shape[0]} positions", 100 * float(equal), "%", "octavo")


def main() -> int:
    """Prints the figures of every form."""
    from transformers import AutoTokenizer

    folder = prepare_model(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL, DEFAULT_CACHE_DIR, print)
    model = load_model(folder, dtype="float32", backend=TorchBackend(), rewrites=no_rewrites)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(TEXT).input_ids)
    ids = ids[: ids.shape[0] // BLOCK_SIZE * BLOCK_SIZE]
    exact = logits(model, ids, lambda rows: rows)
    figures = Figures()
    roundings: dict[str, Rounding] = {
        "pool bfloat16": lambda rows: rows.bfloat16().float(),
        "pool fp8_e4m3": pool_rounding,
        **{f"stored {name}": stored_rounding(form) for name, form in FORMS.items()},
    }
    shapes: dict[str, Sequence[KvShape]] = {folder.name: model.layer_specs, "Llama-8B": [_Layer(8, 128)] * 32}
    for shape, layers in shapes.items():
        sizes = bytes_of_blocks(layers)
        for name, num_bytes in sizes.items():
            figures.add(name, f"block of {BLOCK_SIZE} tokens, {shape}", num_bytes, "bytes", "octavo")
            figures.add(name, f"blocks that fit, {shape}", sizes["pool bfloat16"] / num_bytes, "x bfloat16", "octavo")
    for name, rounding in roundings.items():
        add_quality(figures, name, exact, logits(model, ids, rounding))
    return 0


if __name__ == "__main__":
    sys.exit(main())
