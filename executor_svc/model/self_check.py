"""Does the model compute the same through the paged cache as by itself? Knows models and backends, no files.

Unsupported families fail silently: attention that is never called, masks that are lost, layers that run twice. So every
model is tried at load: a few tokens of two sequences as packed chunks and decodes, against the model's own eager forward.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ModelRefused
from executor_svc.kernels.backend import Backend
from executor_svc.kernels.batch import AttentionBatch, LayerCache
from executor_svc.kernels.layout import layout_of
from executor_svc.model.attention import ATTENTION_NAME, register_attention
from executor_svc.model.forward_context import AttentionCall, ForwardContext, use
from executor_svc.model.layer_spec import LayerSpec

BLOCK_SIZE = 16
SEQUENCE_LENS = (21, 8)
"""Tokens of the two sequences, fewer where the model's context ends before; the first spans two blocks."""
FP32_TOLERANCE = 5e-4
LOW_PRECISION_TOLERANCE = 6e-2
"""Largest difference of logits, relative to the largest logit. Below fp32, rounding may flip an expert's choice, so the
median position is compared instead of the worst."""


@dataclass(frozen=True)
class EagerLogits:
    """What the model computes by itself.

    Attributes:
        token_ids: int64 [len] of each sequence.
        logits: float32 [len, vocab_size] of each sequence.
    """

    token_ids: Sequence[Tensor]
    logits: Sequence[Tensor]


class _Trace(ForwardContext):
    """Takes down what each layer asks for and attends to nothing."""

    def __init__(self, batch: AttentionBatch, backend: Backend) -> None:
        super().__init__(batch, backend, {})
        self.specs: list[LayerSpec] = []

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ForwardContext.attend."""
        self.specs.append(
            LayerSpec(
                layer_idx=call.layer_idx,
                num_kv_heads=key.shape[1],
                head_dim_k=key.shape[2],
                head_dim_v=value.shape[2],
                scale=call.scale,
                window=call.window,
                softcap=call.softcap,
                has_sinks=call.sinks is not None,
            )
        )
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


class _Counting(ForwardContext):
    """Counts each layer's calls."""

    def __init__(self, batch: AttentionBatch, backend: Backend, layer_caches: dict[int, LayerCache], rope_lens: Tensor) -> None:
        super().__init__(batch, backend, layer_caches, rope_lens)
        self.calls: Counter[int] = Counter()

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ForwardContext.attend."""
        self.calls[call.layer_idx] += 1
        return super().attend(call, query, key, value)

    def note_attended(self, layer_idx: int) -> None:
        """See ForwardContext.note_attended."""
        self.calls[layer_idx] += 1


@torch.inference_mode()
def eager_logits(module: nn.Module, vocab_size: int, max_model_len: int, seed: int = 0) -> EagerLogits:
    """Runs the model by itself, one sequence at a time, without a cache. Call it before anything is changed.

    Args:
        module: a transformers causal language model.
        vocab_size: random token ids are below it.
        max_model_len: tokens of a sequence at most.
        seed: of the token ids.

    Raises:
        ModelRefused: the model itself fails or computes NaN.
    """
    family = _family(module)
    _set_attention(module, "eager")
    generator = torch.Generator().manual_seed(seed)
    device = _device(module)
    token_ids = [
        torch.randint(0, vocab_size, (min(length, max_model_len),), generator=generator).to(device) for length in SEQUENCE_LENS
    ]
    try:
        logits = [module(input_ids=ids[None], use_cache=False).logits[0].float() for ids in token_ids]
    except Exception as error:
        raise ModelRefused(f"{family}: its own forward pass failed: {_short(error)}") from error
    if not all(bool(torch.isfinite(row).all()) for row in logits):
        raise ModelRefused(f"{family}: its own forward pass computes NaN or infinity; are the weights damaged?")
    return EagerLogits(token_ids, logits)


@torch.inference_mode()
def trace_layers(module: nn.Module, backend: Backend, num_layers: int) -> tuple[LayerSpec, ...]:
    """Switches the model to paged attention and asks every layer once what it needs.

    Args:
        module: a transformers causal language model.
        backend: not called.
        num_layers: of the model; each must attend exactly once.

    Returns:
        One spec per layer, by layer number.

    Raises:
        ModelRefused: layers do not attend through the interface, or attend more than once, or ask for too much.
    """
    family = _family(module)
    register_attention()
    try:
        _set_attention(module, ATTENTION_NAME)
    except Exception as error:
        raise ModelRefused(f"{family} does not use transformers' attention interface: {_short(error)}") from error
    device = _device(module)
    ids = torch.arange(4, device=device)
    trace = _Trace(packed_batch([(0, 0, 4)], [[0]], block_size=BLOCK_SIZE, device=device), backend)
    try:
        with use(trace):
            module(input_ids=ids[None], position_ids=ids[None], use_cache=False)
    except Exception as error:
        raise ModelRefused(f"{family}: {_short(error)}") from error
    _check_calls(family, Counter(spec.layer_idx for spec in trace.specs), num_layers)
    specs = tuple(sorted(trace.specs, key=lambda spec: spec.layer_idx))
    _check_windows(module, specs)
    return specs


@torch.inference_mode()
def check_paged(
    module: nn.Module,
    backend: Backend,
    layer_specs: Sequence[LayerSpec],
    expected: EagerLogits,
    dtype: torch.dtype,
    *,
    is_quantized: bool = False,
) -> float:
    """Runs the sequences through a small paged cache, packed and in chunks, and compares.

    Args:
        module: set to paged attention.
        backend: that will serve it.
        layer_specs: from trace_layers.
        expected: from eager_logits of the same weights.
        dtype: of activations and cache.
        is_quantized: expected is of the weights before quantisation.

    Returns:
        The largest difference of a logit, relative to the largest logit.

    Raises:
        ModelRefused: logits differ, or a layer is not called once per step.
    """
    family = _family(module)
    differences = paged_differences(module, backend, layer_specs, expected, dtype)
    exact = dtype == torch.float32 and not is_quantized
    difference = float(differences.max() if exact else differences.median())
    tolerance = FP32_TOLERANCE if exact else LOW_PRECISION_TOLERANCE
    if not difference <= tolerance:
        raise ModelRefused(
            f"{family}: logits through the paged cache differ from the model's own by {difference:.2g} of the largest logit, "
            f"allowed is {tolerance:.2g}; the model keeps state that paged attention does not see"
        )
    return float(differences.max())


def paged_differences(
    module: nn.Module, backend: Backend, layer_specs: Sequence[LayerSpec], expected: EagerLogits, dtype: torch.dtype
) -> Tensor:
    """Largest difference at each position, relative to the largest logit of all. Float32 [number of positions]."""
    family = _family(module)
    device = _device(module)
    layout = layout_of(backend.kv_layout_version)
    block_tables = [[5, 2], [4]]
    caches = {
        spec.layer_idx: LayerCache(
            key=torch.zeros(6, *layout.key_shape(spec.num_kv_heads, spec.head_dim_k, BLOCK_SIZE), dtype=dtype, device=device),
            value=torch.zeros(6, *layout.value_shape(spec.num_kv_heads, spec.head_dim_v, BLOCK_SIZE), dtype=dtype, device=device),
        )
        for spec in layer_specs
    }
    largest = max(float(row.abs().max()) for row in expected.logits)
    lens = [len(ids) for ids in expected.token_ids]
    differences: list[Tensor] = []
    for parts in _steps(lens):
        batch = packed_batch(parts, block_tables, block_size=BLOCK_SIZE, device=device)
        rope_lens = torch.tensor([lens[seq] for seq, _, _ in parts], dtype=torch.int32, device=device)
        context = _Counting(batch, backend, caches, rope_lens)
        input_ids = torch.cat([expected.token_ids[seq][start:end] for seq, start, end in parts])
        position_ids = torch.cat([torch.arange(start, end, device=device) for _, start, end in parts])
        try:
            with use(context):
                logits = module(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False).logits[0]
        except Exception as error:
            raise ModelRefused(f"{family}: a packed forward pass failed: {_short(error)}") from error
        _check_calls(family, context.calls, len(layer_specs))
        want = torch.cat([expected.logits[seq][start:end] for seq, start, end in parts])
        differences.append((logits.float() - want).abs().amax(dim=1) / largest)
    return torch.cat(differences)


def _steps(lens: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """The packed batches of the check as (sequence, start, end), decodes first: chunks, a mix, decodes only."""
    computed = [0] * len(lens)
    for step in range(sum(lens)):
        parts = []
        for seq, length in enumerate(lens):
            if step == 0:
                end = max(1, length * 3 // 5)
            elif step == 1 and seq == 0:
                end = max(computed[seq], length - 2)
            else:
                end = min(computed[seq] + 1, length)
            if end > computed[seq]:
                parts.append((seq, computed[seq], end))
                computed[seq] = end
        if not parts:
            return
        yield sorted(parts, key=lambda part: part[2] - part[1] != 1)


def packed_batch(
    parts: Sequence[tuple[int, int, int]],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    device: torch.device | None = None,
) -> AttentionBatch:
    """A packed batch of tokens of several sequences.

    Args:
        parts: (sequence, start, end) for the tokens [start, end) of a sequence; those of one token come first.
        block_tables: block ids of each sequence.
        block_size: tokens per block.
        device: of the tensors; None: the CPU.
    """
    slots = [
        block_tables[seq][position // block_size] * block_size + position % block_size
        for seq, start, end in parts
        for position in range(start, end)
    ]
    lens = [end - start for _, start, end in parts]
    width = max(len(block_tables[seq]) for seq, _, _ in parts)
    tables = [[*block_tables[seq], *[0] * (width - len(block_tables[seq]))] for seq, _, _ in parts]
    num_decodes = next((i for i, length in enumerate(lens) if length != 1), len(lens))
    return AttentionBatch(
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
        seq_lens=torch.tensor([end for _, _, end in parts], dtype=torch.int32, device=device),
        num_decodes=num_decodes,
        max_seqlen_q=max(lens),
        max_seqlen_k=max(end for _, _, end in parts),
        block_size=block_size,
    )


def _check_calls(family: str, calls: Counter[int], num_layers: int) -> None:
    """Refuses a model unless each of its layers attended exactly once."""
    total = calls.total()
    if total == 0:
        raise ModelRefused(
            f"{family} does not use transformers' attention interface: attention ran 0 times for {num_layers} layers"
        )
    if len(calls) != num_layers or total != num_layers:
        raise ModelRefused(f"{family}: attention ran {total} times in {len(calls)} layers, expected once in each of {num_layers}")


def _check_windows(module: nn.Module, specs: Sequence[LayerSpec]) -> None:
    """Refuses a model whose sliding layers do not say their window: a short sequence would not show that it is lost."""
    config: Any = module.config
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    for spec in specs:
        is_sliding = spec.layer_idx < len(layer_types) and layer_types[spec.layer_idx] == "sliding_attention"
        if is_sliding and spec.window is None:
            raise ModelRefused(
                f"{_family(module)}: layer {spec.layer_idx} is a sliding one but passes no window to its attention"
            )


def _set_attention(module: nn.Module, name: str) -> None:
    """Switches the attention implementation of a transformers model."""
    model: Any = module
    model.set_attn_implementation(name)


def _device(module: nn.Module) -> torch.device:
    """Where the model lives."""
    return next(itertools.chain(module.parameters(), module.buffers())).device


def _family(module: nn.Module) -> str:
    """The model's type, for messages."""
    config: Any = module.config
    return str(config.get_text_config().model_type)


def _short(error: Exception) -> str:
    """First line of an error's text."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
