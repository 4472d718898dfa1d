"""All decoder layers of a model as one list of calls, without its modules in between.

Knows parts (stack_parts.py) and the functions that compute them. Does not know families (cuda_rewrite.py makes the parts) or
kernels. Nothing here waits for the device or looks at a value on it, and what is called depends on the number of tokens only:
decode steps can be captured as a CUDA graph.

The residual stream is float32 whatever the weights are: a sum of many small terms loses the most where it is rounded. Of many
tokens, where reading and writing it takes a few percent of a step, it has the weights' dtype, as in transformers, and the
products add to it themselves.

Of the last layer, all tokens' keys and values are needed, but nothing else of tokens whose result nobody wants: where those
are most of many, it goes on with the others alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.stack_functions import StackFunctions, add_product
from executor_svc.model.stack_parts import LayerPart, NormPart


class DecoderStack:
    """A model from token ids to what its head reads.

    Attributes:
        functions: how it is computed.
        layers: in order.
        many_tokens: so many and more are computed over a residual stream of the weights' dtype.
        trimmed_tokens: of so many and more, the last layer computes the wanted ones alone.
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
        """A stack.

        Args:
            embed: int64 [num_tokens] to [num_tokens, hidden_size].
            layers: in order.
            final_norm: after the last.
            functions: how to compute.
            many_tokens: see Attributes.
            trimmed_tokens: see Attributes.
        """
        self.functions = functions
        self.layers = layers
        self.many_tokens = many_tokens
        self.trimmed_tokens = trimmed_tokens
        self._embed = embed
        self._final_norm = final_norm

    def with_functions(self, functions: StackFunctions) -> "DecoderStack":
        """The same stack, computed in another way."""
        return DecoderStack(
            self._embed,
            self.layers,
            self._final_norm,
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
        rows = self._embed(input_ids)
        many = rows.shape[0] >= self.many_tokens and self.layers[0].post_mlp_norm is None
        return self._many(rows, positions, context, keep) if many else self._few(rows, positions, context, keep)

    def _is_trimmed(self, context: ForwardContext, keep: Tensor | None) -> bool:
        """Whether the last layer computes the tokens of keep alone. Not in graphs, whose rows may be padding."""
        num_tokens = context.batch.num_tokens
        is_known = context.batch.query_lens is not None
        return keep is not None and is_known and num_tokens >= self.trimmed_tokens and 4 * keep.shape[0] <= num_tokens

    def _few(self, rows: Tensor, positions: Tensor, context: ForwardContext, keep: Tensor | None) -> Tensor:
        """Norms add what the product before them computed to the residual stream."""
        call, residual = self.functions, rows.float()
        normed, delta = torch.empty_like(rows), torch.empty_like(rows)
        qkv, gated = self._activations(rows)
        call.norm(residual, self.layers[0].attention_norm, normed)
        is_trimmed = self._is_trimmed(context, keep)
        for number, layer in enumerate(self.layers[:-1] if is_trimmed else self.layers):
            call.product(normed, layer.qkv, qkv)
            heads = call.attention(qkv, positions, layer.attention, context)
            call.product(heads, layer.output, delta)
            call.norm(delta, layer.mlp_norm, normed, residual=residual, post=layer.post_attention_norm)
            call.product(normed, layer.gate_up, gated)
            call.product(gated, layer.down, delta)
            if number + 1 < len(self.layers):
                following = self.layers[number + 1].attention_norm
                call.norm(delta, following, normed, residual=residual, post=layer.post_mlp_norm)
        if keep is not None and is_trimmed:
            return self._last_layer(residual, normed, qkv, positions, context, keep)
        out = normed if keep is None else rows.new_empty(keep.shape[0], rows.shape[1])
        call.norm(delta, self._final_norm, out, residual=residual, post=self.layers[-1].post_mlp_norm, rows=keep)
        return out

    def _many(self, residual: Tensor, positions: Tensor, context: ForwardContext, keep: Tensor | None) -> Tensor:
        """Products add what they compute to the residual stream."""
        call, normed = self.functions, torch.empty_like(residual)
        qkv, gated = self._activations(residual)
        is_trimmed = self._is_trimmed(context, keep)
        for layer in self.layers[:-1] if is_trimmed else self.layers:
            call.norm(residual, layer.attention_norm, normed)
            call.product(normed, layer.qkv, qkv)
            heads = call.attention(qkv, positions, layer.attention, context)
            add_product(heads, layer.output, residual)
            call.norm(residual, layer.mlp_norm, normed)
            call.product(normed, layer.gate_up, gated)
            add_product(gated, layer.down, residual)
        if keep is not None and is_trimmed:
            call.norm(residual, self.layers[-1].attention_norm, normed)
            return self._last_layer(residual, normed, qkv, positions, context, keep)
        out = normed if keep is None else residual.new_empty(keep.shape[0], residual.shape[1])
        call.norm(residual, self._final_norm, out, rows=keep)
        return out

    def _last_layer(
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
        residual = residual[keep].float()
        normed, delta = (normed.new_empty(residual.shape) for _ in range(2))
        if keep.shape[0]:
            gated = normed.new_empty(keep.shape[0], layer.gate_up.num_outputs)
            call.product(heads, layer.output, delta)
            call.norm(delta, layer.mlp_norm, normed, residual=residual, post=layer.post_attention_norm)
            call.product(normed, layer.gate_up, gated)
            call.product(gated, layer.down, delta)
            call.norm(delta, self._final_norm, normed, residual=residual, post=layer.post_mlp_norm)
        return normed

    def _activations(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's products hand on: heads before attention, gated values."""
        first = self.layers[0]
        return rows.new_empty(rows.shape[0], first.qkv.num_outputs), rows.new_empty(rows.shape[0], first.gate_up.num_outputs)
