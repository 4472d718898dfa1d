"""All decoder layers of a model of Llama's form as one call of the CPU kernels: nothing happens in Python between layers.

Knows fused layers (rewrite_modules.py) and the kernels' arguments. Does not know when that is right: rewrite.py decides, and
the self-check after it compares logits. The model still loops over its layers: the first call computes all of them, the
others hand its result on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_svc.kernels.batch import Rotary
from executor_svc.kernels.cpu.attention import KEY_CACHE, NUM_FIELDS, VALUE_CACHE, WINDOW
from executor_svc.kernels.cpu.backend import CpuBackend
from executor_svc.kernels.cpu.linear import ADD, PLAIN
from executor_svc.kernels.cpu.norm import rms_norm_arguments
from executor_svc.kernels.cpu.packed_weight import PackedWeight
from executor_svc.kernels.cpu.sequence import KernelSequence
from executor_svc.model.forward_context import ForwardContext, current
from executor_svc.model.rewrite_modules import FusedLayer, packed_rotary

_KERNELS_PER_LAYER = 7
_ATTENTION = 2
"""Index of attention among a layer's kernels."""
_MAX_PROGRAMS = 64
_LARGE_TOKENS = 64
"""Of programs for more tokens, whose rows take megabytes, only the last one is kept; building one takes under a millisecond."""


@dataclass(frozen=True)
class _Rows:
    """Activations of a step, float32 [num_tokens, ...]."""

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    heads: Tensor
    gated: Tensor


class FusedStack:
    """The layers of one model, in order, all of one geometry."""

    def __init__(self, layers: Sequence[FusedLayer]):
        self._layers = layers
        self._programs: dict[tuple[int, int], tuple[_Rows, KernelSequence]] = {}

    @staticmethod
    def fits(layers: Sequence[FusedLayer]) -> bool:
        """Whether the layers can be one stack: float32 activations over panels, and the same heads everywhere."""
        weights = [w for f in layers for w in (f.attention.qkv, f.attention.output, f.mlp.gate_up, f.mlp.down)]
        heads = {(f.attention.head_dim, f.attention.num_kv_heads, f.attention.num_heads) for f in layers}
        widths = {f.mlp.gate_up.out_features for f in layers}
        plain = all(f.attention.call.softcap is None and f.attention.call.sinks is None for f in layers)
        scales = {f.attention.call.scale for f in layers}
        return len(heads) == len(widths) == len(scales) == 1 and plain and all(type(w) is PackedWeight for w in weights)

    def first_call(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """The hidden states [1, num_tokens, hidden_size] after all layers; valid until the next call."""
        context = current()
        rotary = packed_rotary(position_embeddings)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        streams = self._layers[0].attention.qkv.streams(rows.shape[0])
        if not streams or not isinstance(context.backend, CpuBackend):
            hidden = rows.clone()
            for layer in self._layers:
                layer.add_to(hidden, rotary)
            return hidden.view(hidden_states.shape)
        buffers, program = self._program(rows.shape[0], rows.shape[1])
        buffers.hidden.copy_(rows)
        self._set_attention(program, buffers, context, rotary)
        program.run()
        for layer in self._layers:
            context.note_attended(layer.attention.call.layer_idx)
        return buffers.hidden.view(hidden_states.shape)

    def _program(self, num_tokens: int, hidden_size: int) -> tuple[_Rows, KernelSequence]:
        key = (num_tokens, torch.get_num_threads())
        found = self._programs.pop(key, None)
        if found is None:
            if num_tokens > _LARGE_TOKENS:
                self._programs = {kept: program for kept, program in self._programs.items() if kept[0] <= _LARGE_TOKENS}
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            found = self._build(num_tokens, hidden_size)
        self._programs[key] = found
        return found

    def _build(self, num_tokens: int, hidden_size: int) -> tuple[_Rows, KernelSequence]:
        attention, mlp = self._layers[0].attention, self._layers[0].mlp
        rows = _Rows(
            hidden=torch.empty(num_tokens, hidden_size),
            normed=torch.empty(num_tokens, hidden_size),
            qkv=torch.empty(num_tokens, attention.qkv.out_features),
            heads=torch.empty(num_tokens, attention.output.in_features),
            gated=torch.empty(num_tokens, mlp.gate_up.out_features),
        )
        calls = []
        for layer in self._layers:
            attention, mlp = layer.attention, layer.mlp
            calls += [
                rms_norm_arguments(rows.hidden, layer.norm1.weight, layer.norm1.epsilon, rows.normed),
                attention.qkv.arguments(rows.normed, rows.qkv, PLAIN),
                None,
                attention.output.arguments(rows.heads, rows.hidden, ADD),
                rms_norm_arguments(rows.hidden, layer.norm2.weight, layer.norm2.epsilon, rows.normed),
                mlp.gate_up.arguments(rows.normed, rows.gated, PLAIN),
                mlp.down.arguments(rows.gated, rows.hidden, ADD),
            ]
        threads = torch.get_num_threads()
        # Attention is set in every step: here its arguments are only as long as they must be.
        blank = (0, bytes(8 * NUM_FIELDS))
        kernels = [blank if call is None else (call[0].address, call[0].pack(*call[1], threads=threads)) for call in calls]
        return rows, KernelSequence(kernels, threads)

    def _set_attention(self, program: KernelSequence, rows: _Rows, context: ForwardContext, rotary: Rotary) -> None:
        """Sets this step's batch in the arguments of every layer's attention: alike but for caches and windows."""
        attention = self._layers[0].attention
        assert isinstance(context.backend, CpuBackend)
        heads = rows.qkv.view(rows.qkv.shape[0], -1, attention.head_dim)
        query, key, value = heads.split_with_sizes((attention.num_heads, attention.num_kv_heads, attention.num_kv_heads), dim=1)
        calls = [layer.attention.call for layer in self._layers]
        caches = [context.layer_cache(call.layer_idx) for call in calls]
        run, fields = context.backend.arguments(
            (query, key, value, rows.heads.view(heads.shape[0], attention.num_heads, attention.head_dim)),
            caches[0],
            context.batch,
            scale=calls[0].scale,
            window=calls[0].window,
            softcap=None,
            sinks=None,
            rotary=rotary,
        )
        table = program.arguments[_ATTENTION::_KERNELS_PER_LAYER]
        table[:] = np.frombuffer(run.pack(*fields, threads=torch.get_num_threads()), np.int64)
        program.addresses[_ATTENTION::_KERNELS_PER_LAYER] = run.address
        table[:, KEY_CACHE] = [cache.key.data_ptr() for cache in caches]
        table[:, VALUE_CACHE] = [cache.value.data_ptr() for cache in caches]
        table[:, WINDOW] = [call.window or 0 for call in calls]


class StackedLayer:
    """The forward of one layer of a stack: the first computes all, the others pass on what they are given."""

    def __init__(self, stack: FusedStack, *, is_first: bool):
        self._stack = stack
        self._is_first = is_first

    def __call__(
        self, hidden_states: Tensor, *args: object, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: object
    ) -> Tensor:
        """As LlamaDecoderLayer.forward."""
        if not self._is_first:
            return hidden_states
        assert position_embeddings is not None
        return self._stack.first_call(hidden_states, position_embeddings)
