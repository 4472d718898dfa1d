"""What a decoder stack is made of: norms, products, attention of every layer, as plain data. Knows no kernel and no family.

```
h --norm--> qkv --> attention --> output --(post norm)--> added to h
h --norm--> gate_up --> down --(post norm)--> added to h
```
"""

from dataclasses import dataclass

from torch import Tensor

from executor_svc.model.forward_context import AttentionCall


@dataclass(frozen=True, eq=False)
class NormPart:
    """RMS norm: x * rsqrt(mean(x^2) + epsilon) * weight.

    Attributes:
        weight: float32 [width], as it multiplies: 1 is in it for families that store w and mean 1 + w.
    """

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, eq=False)
class ProductPart:
    """A linear layer, or several with one input, or gates and what they multiply.

    Attributes:
        weight: [out_features, in_features], contiguous.
        bias: [out_features], or None.
        activation: "silu" or "gelu_tanh": the result is activation(first half) * second half; None: the sums themselves.
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str | None = None

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // (1 if self.activation is None else 2)


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Rotary embedding by position: x * cos + rotate_half(x) * sin on the first rotary_dim dimensions of a head.

    Attributes:
        cos: float32 [max_position, rotary_dim].
        sin: same.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False)
class AttentionPart:
    """What happens between a layer's qkv product and its output product.

    Attributes:
        call: layer number, scale, window, softcap; no sinks, no rotary.
        num_heads, num_kv_heads, head_dim: of the product's columns: queries, keys, values.
        rotary: of queries and keys.
        q_norm, k_norm: of each head, before it is rotated; both or none.
    """

    call: AttentionCall
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotaryTable
    q_norm: NormPart | None = None
    k_norm: NormPart | None = None

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of queries, keys, values in heads [num_tokens, num_heads + 2 * num_kv_heads, head_dim]."""
        query, key, value = heads.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        return query, key, value


@dataclass(frozen=True, eq=False)
class LayerPart:
    """One decoder layer.

    Attributes:
        post_attention_norm, post_mlp_norm: of what a block adds to the residual stream (Gemma); both or none, with the epsilon
            of the norms before the blocks.
    """

    attention_norm: NormPart
    qkv: ProductPart
    attention: AttentionPart
    output: ProductPart
    mlp_norm: NormPart
    gate_up: ProductPart
    down: ProductPart
    post_attention_norm: NormPart | None = None
    post_mlp_norm: NormPart | None = None
