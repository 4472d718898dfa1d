"""What a decoder stack calls, and all of it in plain torch operations. Knows parts (stack_parts.py), no family and no kernel.

Each rewrite of the graph optimiser is one of these functions: with its torch form in its place, that rewrite is off.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.batch import LayerCache, Rotary
from executor_svc.kernels.reference import rotate
from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.stack_parts import AttentionPart, NormPart, ProductPart

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class NormFunction(Protocol):
    """RMS norm with what stands before it."""

    def __call__(
        self,
        x: Tensor,
        norm: NormPart,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        post: NormPart | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """Computes into out.

        Args:
            x: [num_tokens, width].
            norm: what out is.
            out: [num_tokens, width], or [num_rows, width] with rows.
            residual: [num_tokens, width]; out is of residual + x, which residual holds afterwards, unless rows is given.
            post: x is normalised by it before it is added.
            rows: int64 [num_rows], the tokens that out is wanted for; None: all.
        """
        ...


class ProductFunction(Protocol):
    """A product with a weight."""

    def __call__(self, x: Tensor, product: ProductPart, out: Tensor) -> None:
        """Computes into out.

        Args:
            x: [num_tokens, in_features].
            product: with what.
            out: [num_tokens, product.num_outputs].
        """
        ...


class AttentionFunction(Protocol):
    """Everything between two products: head norms, rotary embedding, KV write, attention."""

    def __call__(
        self, qkv: Tensor, positions: Tensor, part: AttentionPart, context: ForwardContext, *, rows: Tensor | None = None
    ) -> Tensor:
        """One layer's.

        Args:
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
            positions: int64 [num_tokens].
            part: of the layer.
            context: of the step.
            rows: int64 [num_rows], the tokens whose result is wanted, none perhaps; None: all. KV of all tokens is written.

        Returns:
            [num_tokens, num_heads * head_dim], or [num_rows, num_heads * head_dim] with rows.
        """
        ...


class TurnFunction(Protocol):
    """The first half of AttentionFunction: head norms, rotary embedding, KV write if it is not part of the second."""

    def __call__(
        self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor, part: AttentionPart, cache: LayerCache, turned: Tensor
    ) -> None:
        """One layer's, in a form that depends on the number of tokens only.

        Args:
            qkv: as in AttentionFunction; of tokens without a slot nothing is written to the cache.
            positions: int64 [num_tokens].
            slot_mapping: int64 [num_tokens], -1: none.
            part: of the layer.
            cache: of the layer.
            turned: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], for queries, keys, values.
        """
        ...


class AttendFunction(Protocol):
    """The second half."""

    def __call__(self, turned: Tensor, part: AttentionPart, context: ForwardContext, out: Tensor) -> None:
        """One layer's.

        Args:
            turned: [num_rows, num_heads + 2 * num_kv_heads, head_dim], what TurnFunction made of the step's tokens, and
                rows behind them that are finite.
            part: of the layer.
            context: of the step.
            out: [num_rows, num_heads, head_dim], whose first num_tokens rows are computed.
        """
        ...


@dataclass(frozen=True)
class StackFunctions:
    """One way to compute a stack.

    Attributes:
        turn, attend: attention in two halves, of which the first can be captured.
    """

    norm: NormFunction
    product: ProductFunction
    attention: AttentionFunction
    turn: TurnFunction
    attend: AttendFunction


def torch_norm(
    x: Tensor,
    norm: NormPart,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    post: NormPart | None = None,
    rows: Tensor | None = None,
) -> None:
    """See NormFunction."""
    value = x.float()
    if rows is not None:
        value = value[rows]
        residual = None if residual is None else residual[rows]
    if post is not None:
        value = functional.rms_norm(value, post.weight.shape, post.weight, post.epsilon)
    if residual is not None:
        residual.add_(value)  # a copy if rows are picked
        value = residual.float()
    out.copy_(functional.rms_norm(value, norm.weight.shape, norm.weight, norm.epsilon))


def torch_product(x: Tensor, product: ProductPart, out: Tensor) -> None:
    """See ProductFunction."""
    result = functional.linear(x, product.weight, product.bias)
    if product.activation is not None:
        gate, up = result.chunk(2, dim=1)
        result = ACTIVATIONS[product.activation](gate) * up
    out.copy_(result)


def add_product(x: Tensor, product: ProductPart, total: Tensor) -> None:
    """Adds a product without activation to total [num_tokens, num_outputs], of the weight's dtype, in place."""
    torch.addmm(total, x, product.weight.t(), out=total)
    if product.bias is not None:
        total.add_(product.bias)


def torch_attention(
    qkv: Tensor, positions: Tensor, part: AttentionPart, context: ForwardContext, *, rows: Tensor | None = None
) -> Tensor:
    """See AttentionFunction."""
    turned = qkv.new_empty(qkv.shape[0], qkv.shape[1] // part.head_dim, part.head_dim)
    torch_turn(qkv, positions, context.batch.slot_mapping, part, context.layer_cache(part.call.layer_idx), turned)
    out = qkv.new_empty(qkv.shape[0], part.num_heads, part.head_dim)
    torch_attend(turned, part, context, out)
    return out.flatten(1) if rows is None else out[rows].flatten(1)


def torch_turn(
    qkv: Tensor, positions: Tensor, slot_mapping: Tensor, part: AttentionPart, cache: LayerCache, turned: Tensor
) -> None:
    """See TurnFunction; backends write KV themselves."""
    query, key, value = part.split(qkv.view(turned.shape))
    rotary = Rotary(part.rotary.cos[positions], part.rotary.sin[positions])
    for into, heads, norm in zip(part.split(turned), (query, key), (part.q_norm, part.k_norm), strict=False):
        into.copy_(rotate(_head_norm(heads.float(), norm), rotary))
    part.split(turned)[2].copy_(value)


def torch_attend(turned: Tensor, part: AttentionPart, context: ForwardContext, out: Tensor) -> None:
    """See AttendFunction."""
    num_tokens = context.batch.num_tokens
    out[:num_tokens] = context.attend(part.call, *part.split(turned[:num_tokens]))


def _head_norm(heads: Tensor, norm: NormPart | None) -> Tensor:
    return heads if norm is None else functional.rms_norm(heads, norm.weight.shape, norm.weight, norm.epsilon)


TORCH_FUNCTIONS = StackFunctions(torch_norm, torch_product, torch_attention, torch_turn, torch_attend)
"""Right everywhere, fast nowhere: what the others are compared with."""
