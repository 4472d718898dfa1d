"""All decoder layers of a model as one list of calls, without its modules in between.

Knows parts (stack_parts.py) and the functions that compute them. Does not know families (cuda_rewrite.py makes the parts) or
kernels. Each norm adds what the product before it computed to the residual stream. Nothing here waits for the device or looks
at a value on it, and what is called depends on the number of tokens only: decode steps can be captured as a CUDA graph.

The residual stream is float32 whatever the weights are: a sum of many small terms loses the most where it is rounded.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.stack_functions import StackFunctions
from executor_svc.model.stack_parts import LayerPart, NormPart


class DecoderStack:
    """A model from token ids to what its head reads.

    Attributes:
        functions: how it is computed.
        layers: in order.
    """

    def __init__(
        self, embed: Callable[[Tensor], Tensor], layers: Sequence[LayerPart], final_norm: NormPart, functions: StackFunctions
    ):
        """A stack.

        Args:
            embed: int64 [num_tokens] to [num_tokens, hidden_size].
            layers: in order.
            final_norm: after the last.
            functions: how to compute.
        """
        self.functions = functions
        self.layers = layers
        self._embed = embed
        self._final_norm = final_norm

    def with_functions(self, functions: StackFunctions) -> "DecoderStack":
        """The same stack, computed in another way."""
        return DecoderStack(self._embed, self.layers, self._final_norm, functions)

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
        residual, dtype = rows.float(), rows.dtype
        call, first = self.functions, self.layers[0]
        num_tokens, width = residual.shape
        normed, delta = (residual.new_empty(num_tokens, width, dtype=dtype) for _ in range(2))
        qkv, gated = (residual.new_empty(num_tokens, part.num_outputs, dtype=dtype) for part in (first.qkv, first.gate_up))
        call.norm(residual, first.attention_norm, normed)
        for number, layer in enumerate(self.layers):
            call.product(normed, layer.qkv, qkv)
            heads = call.attention(qkv, positions, layer.attention, context)
            call.product(heads, layer.output, delta)
            call.norm(delta, layer.mlp_norm, normed, residual=residual, post=layer.post_attention_norm)
            call.product(normed, layer.gate_up, gated)
            call.product(gated, layer.down, delta)
            if number + 1 < len(self.layers):
                following = self.layers[number + 1].attention_norm
                call.norm(delta, following, normed, residual=residual, post=layer.post_mlp_norm)
        out = normed if keep is None else residual.new_empty(keep.shape[0], width, dtype=dtype)
        call.norm(delta, self._final_norm, out, residual=residual, post=self.layers[-1].post_mlp_norm, rows=keep)
        return out
