"""Steps of many tokens in few launches: what lies between the attention of two layers, captured once for each number of tokens.

    embed, norm, qkv, rotate | attention | output, norm, gate_up, down, norm, qkv, rotate | attention | output ...
    piece 0                  | launched  | piece 1                                        | launched  | piece 2

The host takes half a millisecond to launch a layer kernel by kernel, the device less than that to compute some thousand tokens of
a small model. Attention depends on lengths, so it stays outside; all else depends on the number of tokens alone, which is rounded
up: rows behind the step's own are padding. They belong to no sequence, have no slot, and hold finite numbers.

Knows a decoder stack (cuda_stack.py) and how to capture. Does not know steps or sequences. The form is that of piecewise graphs
in other engines, with the last layer left out, because most tokens are not wanted there.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.library import GRID
from executor_svc.kernels.triton.prefill import packed_rows
from executor_svc.model.cuda_stack import DecoderStack
from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.residual import InPlaceResidual, Residual, RoundedLate
from executor_svc.model.stack_parts import LayerPart

ResultT = TypeVar("ResultT")
FINEST = 256
"""Tokens that sizes are multiples of: products compute rows in tiles of as many, so that little is computed for nothing."""
_COARSE_FROM = 4096
_LAUNCH_S = 0.6e-3
"""What the host takes to launch a layer kernel by kernel: measured 0.45 to 0.78 ms beside an H200."""
_FLOPS_PER_S = 600e12
"""Of products of many tokens in 16 bits on an H200; other devices are slower, and gain less."""


class Capturing(Protocol):
    """The stream that pieces run on; see executor_svc.cuda.stream.DeviceStream."""

    def capture(self, work: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        """Takes down work that has run before."""
        ...


def sizes(least_tokens: int, most_tokens: int) -> list[int]:
    """Numbers of tokens above least_tokens that there are pieces for, up to most_tokens, ascending."""
    fine = range(FINEST, _COARSE_FROM, FINEST)
    coarse = range(_COARSE_FROM, most_tokens + 1, 2 * FINEST)
    return [size for size in (*fine, *coarse) if least_tokens < size <= most_tokens]


def most_tokens_worth(layers: Sequence[LayerPart]) -> int:
    """Tokens above which the device takes longer to compute layers than the host to launch them one by one."""
    products = (product for layer in layers for product in (layer.qkv, layer.output, layer.gate_up, layer.down))
    num_weights = sum(product.weight.numel() for product in products)
    return int(len(layers) * _LAUNCH_S * _FLOPS_PER_S / (2 * num_weights))


@dataclass(frozen=True)
class _Buffers:
    """Memory of all pieces, each of which uses the first rows.

    Attributes:
        input_ids, positions, slots: int64 [most_tokens].
        sums: float32 [most_tokens, hidden_size], in place of rows where those are not sums.
        rows, normed, delta: [most_tokens, hidden_size].
        qkv, gated: [most_tokens, columns].
        turned: [most_tokens + GRID, heads, head_dim]: queries, keys, values of each token.
        attended: [most_tokens + GRID, num_heads, head_dim].
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    sums: Tensor
    rows: Tensor
    normed: Tensor
    delta: Tensor
    qkv: Tensor
    gated: Tensor
    turned: Tensor
    attended: Tensor

    @staticmethod
    def make(layer: LayerPart, most_tokens: int) -> "_Buffers":
        """For layers like this one."""
        part, weight = layer.attention, layer.qkv.weight
        hidden_size, device = weight.shape[1], weight.device
        num_heads = part.num_heads + 2 * part.num_kv_heads

        def zeros(*shape: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def ids() -> Tensor:
            return zeros(most_tokens, dtype=torch.int64)

        def hidden(dtype: torch.dtype = weight.dtype) -> Tensor:
            return zeros(most_tokens, hidden_size, dtype=dtype)

        return _Buffers(
            input_ids=ids(),
            positions=ids(),
            slots=ids(),
            sums=hidden(torch.float32),
            rows=hidden(),
            normed=hidden(),
            delta=hidden(),
            qkv=zeros(most_tokens, layer.qkv.num_outputs),
            gated=zeros(most_tokens, layer.gate_up.num_outputs),
            turned=zeros(most_tokens + GRID, num_heads, part.head_dim),
            attended=zeros(most_tokens + GRID, part.num_heads, part.head_dim),
        )


def buffer_bytes(layer: LayerPart, most_tokens: int) -> int:
    """Bytes that pieces of up to so many tokens take, their widest scratch included; graphs themselves are not counted."""
    part, columns = layer.attention, (layer.qkv, layer.gate_up)
    hidden_size, size = layer.qkv.weight.shape[1], layer.qkv.weight.itemsize
    heads = (2 * part.num_heads + 2 * part.num_kv_heads) * part.head_dim
    widths = 3 * hidden_size + sum(product.num_outputs for product in columns) + layer.gate_up.weight.shape[0] + heads
    return (most_tokens + GRID) * (widths * size + 4 * hidden_size + 24)


class LayerPieces:
    """See the module's first lines; a stack's Pieces.

    Args:
        stack: whose layers are alike.
        layer_caches: by layer number, of the pool that steps run over.
        most_tokens: of a step that there is room for.
    """

    def __init__(self, stack: DecoderStack, layer_caches: Mapping[int, LayerCache], most_tokens: int):
        self._stack = stack
        self._layer_caches = layer_caches
        self._buffers = _Buffers.make(stack.layers[0], most_tokens)
        self._pieces: dict[int, list[Callable[[], None]]] = {}

    @property
    def num_pieces(self) -> int:
        """Of all sizes."""
        return sum(len(pieces) for pieces in self._pieces.values())

    def capture(self, stream: Capturing, all_sizes: Sequence[int]) -> None:
        """Captures the pieces of each number of tokens, on the stream in use. Raises what capturing raises."""
        self._buffers.slots.fill_(-1)
        for size in sorted(all_sizes, reverse=True):
            works = self._works(size)
            for work in (works[0], works[1], works[-1]):  # layers are alike
                work()
            self._pieces[size] = [stream.capture(work)[0] for work in works]

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext, keep: Tensor) -> Tensor | None:
        """See Pieces."""
        num_tokens = input_ids.shape[0]
        size = min((size for size in self._pieces if size >= num_tokens), default=None)
        if size is None or context.layer_caches is not self._layer_caches:
            return None
        buffers, pieces, batch = self._buffers, self._pieces[size], context.batch
        buffers.input_ids[:num_tokens].copy_(input_ids)
        buffers.positions[:num_tokens].copy_(positions)
        buffers.slots[:num_tokens].copy_(batch.slot_mapping)
        if num_tokens < size:
            buffers.slots[num_tokens:size].fill_(-1)
            buffers.attended[num_tokens:size].zero_()
        num_rows = packed_rows(batch) or num_tokens
        turned, out = buffers.turned[:num_rows], buffers.attended[:num_rows]
        for layer, replay in zip(self._stack.layers[:-1], pieces[:-1], strict=True):
            replay()
            self._stack.functions.attend(turned, layer.attention, context, out)
        pieces[-1]()
        rows = self._residual(size).rows[:num_tokens]
        return self._stack.last_layer(rows, buffers.normed[:num_tokens], buffers.qkv[:num_tokens], positions, context, keep)

    def _works(self, size: int) -> list[Callable[[], None]]:
        """What the pieces of a size do, in order: one in front of every layer's attention but the last's, and one after those."""
        layers = self._stack.layers

        def first() -> None:
            residual, buffers = self._residual(size), self._buffers
            residual.rows.copy_(self._stack.embed(buffers.input_ids[:size]))
            residual.begin(layers[0].attention_norm)
            self._turn(size, residual, layers[0])

        def between(layer: LayerPart, following: LayerPart) -> Callable[[], None]:
            def work() -> None:
                residual = self._residual(size)
                self._finish(size, residual, layer, following)
                if following is not layers[-1]:
                    self._turn(size, residual, following)

            return work

        return [first, *(between(*pair) for pair in itertools.pairwise(layers))]

    def _residual(self, size: int) -> Residual:
        buffers, functions = self._buffers, self._stack.functions
        normed = buffers.normed[:size]
        if self._stack.sums_in_place(size):
            return InPlaceResidual(functions, buffers.rows[:size], normed)
        return RoundedLate(functions, buffers.sums[:size], normed, buffers.delta[:size])

    def _turn(self, size: int, residual: Residual, layer: LayerPart) -> None:
        """A layer up to its attention."""
        buffers, call = self._buffers, self._stack.functions
        qkv, cache = buffers.qkv[:size], self._layer_caches[layer.attention.call.layer_idx]
        call.product(residual.normed, layer.qkv, qkv)
        call.turn(qkv, buffers.positions[:size], buffers.slots[:size], layer.attention, cache, buffers.turned[:size])

    def _finish(self, size: int, residual: Residual, layer: LayerPart, following: LayerPart) -> None:
        """A layer behind its attention, and the norm of the next one."""
        heads, gated = self._buffers.attended[:size].flatten(1), self._buffers.gated[:size]
        self._stack.after_attention(layer, residual, heads, gated)
        residual.add(gated, layer.down, following.attention_norm, post=layer.post_mlp_norm)
