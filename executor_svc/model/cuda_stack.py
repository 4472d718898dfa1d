"""All decoder layers of a model as one list of calls, without its modules in between.

Knows parts (stack_parts.py) and the functions that compute them. Does not know families (cuda_rewrite.py makes the parts) or
kernels. Nothing here waits for the device or looks at a value on it, and what is called depends on the number of tokens only:
decode steps can be captured as a CUDA graph, and of other steps what lies between two layers' attention (cuda_pieces.py).

The residual stream is float32 whatever the weights are: a sum of many small terms loses the most where it is rounded. Of many
tokens, where reading and writing it takes a few percent of a step, it has the weights' dtype, as in transformers, and the
products add to it themselves.

Of the last layer, all tokens' keys and values are needed, but nothing else of tokens whose result nobody wants: where those
are most of many, it goes on with the others alone.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.residual import InPlaceResidual, Residual, RoundedLate
from executor_svc.model.stack_functions import StackFunctions
from executor_svc.model.stack_parts import LayerPart, NormPart


class Pieces(Protocol):
    """A step whose layers are launched in few pieces, see cuda_pieces.py."""

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext, keep: Tensor) -> Tensor | None:
        """As DecoderStack.forward, of a step whose last layer is trimmed; None: there are no pieces for it."""
        ...


class DecoderStack:
    """A model from token ids to what its head reads.

    Attributes:
        functions: how it is computed.
        layers: in order.
        final_norm: after the last.
        embed: int64 [num_tokens] to [num_tokens, hidden_size].
        many_tokens: so many and more are computed over a residual stream of the weights' dtype.
        trimmed_tokens: of so many and more, the last layer computes the wanted ones alone.
        pieces: for steps that the host would take longer to launch than the device to compute; None: there are none.
    """

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        layers: Sequence[LayerPart],
        final_norm: NormPart,
        functions: StackFunctions,
        *,
        many_tokens: int = 2048,
        trimmed_tokens: int = 1024,
    ):
        """A stack without pieces; for the arguments see Attributes."""
        self.functions = functions
        self.layers = layers
        self.final_norm = final_norm
        self.embed = embed
        self.many_tokens = many_tokens
        self.trimmed_tokens = trimmed_tokens
        self.pieces: Pieces | None = None

    def with_functions(self, functions: StackFunctions) -> "DecoderStack":
        """The same stack, computed in another way."""
        return DecoderStack(
            self.embed,
            self.layers,
            self.final_norm,
            functions,
            many_tokens=self.many_tokens,
            trimmed_tokens=self.trimmed_tokens,
        )

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext, keep: Tensor | None = None) -> Tensor:
        """One step.

        Args:
            input_ids: int64 [num_tokens].
            positions: int64 [num_tokens], in each token's own sequence.
            context: of the step.
            keep: int64 [num_rows], tokens whose result is wanted; None: all.

        Returns:
            [num_tokens or num_rows, hidden_size], normalised, in the weights' dtype.
        """
        is_trimmed = self._is_trimmed(context, keep)
        if is_trimmed and keep is not None and self.pieces is not None:
            found = self.pieces.forward(input_ids, positions, context, keep)
            if found is not None:
                return found
        rows = self.embed(input_ids)
        residual, (qkv, gated) = self.residual(rows), self.activations(rows)
        call = self.functions
        residual.begin(self.layers[0].attention_norm)
        for layer, following in itertools.pairwise(self.layers):
            call.product(residual.normed, layer.qkv, qkv)
            heads = call.attention(qkv, positions, layer.attention, context)
            self.after_attention(layer, residual, heads, gated)
            residual.add(gated, layer.down, following.attention_norm, post=layer.post_mlp_norm)
        if keep is not None and is_trimmed:
            return self.last_layer(residual.rows, residual.normed, qkv, positions, context, keep)
        last = self.layers[-1]
        call.product(residual.normed, last.qkv, qkv)
        heads = call.attention(qkv, positions, last.attention, context)
        self.after_attention(last, residual, heads, gated)
        out = residual.normed if keep is None else rows.new_empty(keep.shape[0], rows.shape[1])
        residual.add(gated, last.down, self.final_norm, post=last.post_mlp_norm, out=out, rows=keep)
        return out

    def residual(self, rows: Tensor) -> Residual:
        """The residual stream that begins with rows [num_tokens, hidden_size], which may become part of it."""
        normed = torch.empty_like(rows)
        if self.sums_in_place(rows.shape[0]):
            return InPlaceResidual(self.functions, rows, normed)
        return RoundedLate(self.functions, rows.float(), normed, torch.empty_like(rows))

    def sums_in_place(self, num_tokens: int) -> bool:
        """Which form the residual stream of so many tokens has."""
        return num_tokens >= self.many_tokens and self.layers[0].post_mlp_norm is None

    def activations(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's products hand on: heads before attention, gated values."""
        first = self.layers[0]
        return rows.new_empty(rows.shape[0], first.qkv.num_outputs), rows.new_empty(rows.shape[0], first.gate_up.num_outputs)

    def after_attention(self, layer: LayerPart, residual: Residual, heads: Tensor, gated: Tensor) -> None:
        """What follows a layer's attention, up to its gated values [num_tokens, columns], which only have to be added."""
        residual.add(heads, layer.output, layer.mlp_norm, post=layer.post_attention_norm)
        self.functions.product(residual.normed, layer.gate_up, gated)

    def last_layer(
        self, residual: Tensor, normed: Tensor, qkv: Tensor, positions: Tensor, context: ForwardContext, keep: Tensor
    ) -> Tensor:
        """The last layer and the final norm of the tokens of keep: normalised [num_rows, hidden_size].

        Args:
            residual: [num_tokens, hidden_size], of all tokens.
            normed: the same after the layer's first norm.
            qkv: scratch [num_tokens, columns].
            positions: int64 [num_tokens].
            context: of the step.
            keep: int64 [num_rows].
        """
        call, layer = self.functions, self.layers[-1]
        call.product(normed, layer.qkv, qkv)
        heads = call.attention(qkv, positions, layer.attention, context, rows=keep)
        rows = residual[keep].float()
        wanted = RoundedLate(call, rows, *(normed.new_empty(rows.shape) for _ in range(2)))
        if keep.shape[0]:
            gated = normed.new_empty(keep.shape[0], layer.gate_up.num_outputs)
            self.after_attention(layer, wanted, heads, gated)
            wanted.add(gated, layer.down, self.final_norm, post=layer.post_mlp_norm)
        return wanted.normed

    def _is_trimmed(self, context: ForwardContext, keep: Tensor | None) -> bool:
        """Whether the last layer computes the tokens of keep alone. Not in graphs, whose rows may be padding."""
        num_tokens = context.batch.num_tokens
        is_known = context.batch.query_lens is not None
        return keep is not None and is_known and num_tokens >= self.trimmed_tokens and 4 * keep.shape[0] <= num_tokens
