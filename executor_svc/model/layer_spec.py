"""What one layer keeps in the paged cache and how it attends. Traced from a forward pass, never read from a config."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer.

    Attributes:
        layer_idx: the layer's number in the model; names its cache.
        num_kv_heads: heads of the cache.
        head_dim_k: of keys and queries.
        head_dim_v: of values.
        scale, window, softcap: as AttentionCall.
        has_sinks: whether AttentionCall.sinks is set.
    """

    layer_idx: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool

    @property
    def num_values_per_token(self) -> int:
        """Numbers that a token keeps in this layer's cache, keys and values together."""
        return self.num_kv_heads * (self.head_dim_k + self.head_dim_v)
