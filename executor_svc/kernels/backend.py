"""The interface that every attention backend has.

Knows tensors. Does not know models, requests or the pool's allocator.
"""

from typing import Protocol

from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary


class Backend(Protocol):
    """Paged attention on one kind of device.

    Attributes:
        name: for people, for example "cpu".
        kv_layout_version: part of the KV fingerprint; two backends share it if they read each other's blocks.
    """

    name: str
    kv_layout_version: str

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
        """Writes the new KV into its slots, then attends causally to everything cached of each token's sequence.

        Args:
            query: [num_tokens, num_heads, head_dim_k]; rows may be strided, the last two dimensions are contiguous.
            key: [num_tokens, num_kv_heads, head_dim_k], same.
            value: [num_tokens, num_kv_heads, head_dim_v], same.
            layer_cache: the layer's pool; written at batch.slot_mapping.
            batch: what the tokens are.
            scale: scores are multiplied by it.
            window: a key is visible if key_position > query_position - window; None: all before.
            softcap: scores become softcap * tanh(score / softcap); None: they do not.
            sinks: float [num_heads], a score of each head's extra column that takes weight and has no value; None: none.
            rotary: applied to query and key first; None: they are rotated already, or never.

        Returns:
            [num_tokens, num_heads, head_dim_v], contiguous, the dtype of query.
        """
        ...
