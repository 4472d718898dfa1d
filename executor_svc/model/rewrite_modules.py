"""Modules that stand in for a model's own: packed linear layers and tables, normalisation, and whole Llama-like blocks.

Knows what the originals compute. Does not know when a replacement is right (rewrite.py decides and checks that), nor
batches or requests. All of them work on packed rows: [1, num_tokens, width] is [num_tokens, width].
"""

from typing import Any

import torch
from torch import Tensor, nn

from executor_svc.kernels.batch import Rotary
from executor_svc.kernels.cpu.linear import ADD
from executor_svc.kernels.cpu.norm import rms_norm
from executor_svc.kernels.cpu.packed_weight import PackedWeight
from executor_svc.model.forward_context import AttentionCall, current


class PackedModule(nn.Module):
    """Shows a packed weight's tensors as buffers, so that memory is accounted for."""

    def hold(self, name: str, weight: PackedWeight) -> PackedWeight:
        """Registers the weight's tensors under a name."""
        for part, tensor in weight.tensors.items():
            self.register_buffer(f"{name}_{part}", tensor, persistent=False)
        return weight


class PackedLinear(PackedModule):
    """nn.Linear over a packed weight."""

    def __init__(self, weight: PackedWeight):
        super().__init__()
        self.packed = self.hold("packed", weight)
        self.in_features, self.out_features = weight.in_features, weight.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], the dtype of x."""
        rows = x.reshape(-1, self.in_features).float()
        return self.packed.apply(rows).to(x.dtype).view(*x.shape[:-1], self.out_features)


class PackedEmbedding(PackedModule):
    """nn.Embedding over the packed weight of a linear layer that is tied to it."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype):
        super().__init__()
        self.packed = self.hold("packed", weight)
        self.dtype = dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        """Int64 [...] to [..., embedding_dim]."""
        return self.packed.rows(token_ids.flatten()).to(self.dtype).view(*token_ids.shape, self.packed.in_features)


class FloatEmbedding(nn.Module):
    """A table of a bfloat16 model whose rows come out as float32: so begins a residual stream in float32."""

    def __init__(self, table: nn.Module):
        super().__init__()
        self.table = table

    def forward(self, token_ids: Tensor) -> Tensor:
        """Int64 [...] to float32 [..., embedding_dim]."""
        rows: Tensor = self.table(token_ids)
        return rows.float()


class MergedLinears(PackedModule):
    """Several linear layers of one input as one product; the first part that is called computes it for all."""

    def __init__(self, weight: PackedWeight, widths: list[int]):
        super().__init__()
        self.packed = self.hold("packed", weight)
        self.widths = widths
        self._x: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        """The index-th layer's result for x."""
        if self._x is not x or self._parts[index] is None:
            rows = x.reshape(-1, self.packed.in_features).float()
            merged = self.packed.apply(rows).to(x.dtype).view(*x.shape[:-1], self.packed.out_features)
            self._x, self._parts = x, list(torch.split(merged, self.widths, dim=-1))
        found = self._parts[index]
        assert found is not None
        self._parts[index] = None
        if not any(part is not None for part in self._parts):
            self._x = None
        return found


class MergedPart(nn.Module):
    """One of the layers of MergedLinears."""

    def __init__(self, merged: MergedLinears, index: int):
        super().__init__()
        self.merged, self.index = merged, index

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.merged.part(self.index, x)


class FusedNorm(nn.Module):
    """RMS normalisation with a float32 weight."""

    weight: Tensor

    def __init__(self, weight: Tensor, epsilon: float):
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.epsilon).view(x.shape)


class FusedMlp(PackedModule):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, gate_up: PackedWeight, down: PackedWeight):
        super().__init__()
        self.gate_up, self.down = self.hold("gate_up", gate_up), self.hold("down", down)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the result for x [num_tokens, hidden_size] to residual, in place."""
        self.down.apply(self.gate_up.apply(x), residual, mode=ADD)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] to the same."""
        rows = x.reshape(-1, self.gate_up.in_features).float()
        return self.down.apply(self.gate_up.apply(rows)).to(x.dtype).view(*x.shape[:-1], self.down.out_features)


class FusedAttention(PackedModule):
    """Attention of Llama's form: merged projections, rotary embedding within the paged attention, no copies between."""

    def __init__(self, qkv: PackedWeight, output: PackedWeight, call: AttentionCall, head_dim: int, num_kv_heads: int):
        super().__init__()
        self.qkv, self.output = self.hold("qkv", qkv), self.hold("output", output)
        self.call, self.head_dim, self.num_kv_heads = call, head_dim, num_kv_heads
        self.num_heads = qkv.out_features // head_dim - 2 * num_kv_heads
        self.layer_idx = call.layer_idx

    def attend(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Rows float32 [num_tokens, hidden_size] to heads' results side by side, before the output projection."""
        heads = self.qkv.apply(x).view(x.shape[0], -1, self.head_dim)
        query, key, value = heads.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        call = self.call
        call = AttentionCall(call.layer_idx, call.scale, call.window, call.softcap, call.sinks, rotary)
        return current().attend(call, query, key, value).view(x.shape[0], -1)

    def add_to(self, residual: Tensor, x: Tensor, rotary: Rotary) -> None:
        """Adds the result for x [num_tokens, hidden_size] to residual, in place."""
        self.output.apply(self.attend(x, rotary), residual, mode=ADD)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *args: object, **kwargs: object
    ) -> tuple[Tensor, None]:
        """As LlamaAttention; returns no attention weights."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).float()
        out = self.output.apply(self.attend(rows, packed_rotary(position_embeddings)))
        return out.to(hidden_states.dtype).view(*hidden_states.shape[:-1], -1), None


class FusedLayer:
    """The forward of a decoder layer of Llama's form: h += attention(norm(h)); h += mlp(norm(h))."""

    def __init__(self, layer: Any):
        self.norm1: FusedNorm = layer.input_layernorm
        self.norm2: FusedNorm = layer.post_attention_layernorm
        self.attention: FusedAttention = layer.self_attn
        self.mlp: FusedMlp = layer.mlp

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: object = None,
        position_ids: object = None,
        cache: object = None,
        use_cache: object = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: object,
    ) -> Tensor:
        """As LlamaDecoderLayer.forward."""
        assert position_embeddings is not None
        h = hidden_states.reshape(-1, hidden_states.shape[-1]).clone()
        self.add_to(h, packed_rotary(position_embeddings))
        return h.view(hidden_states.shape)

    def add_to(self, h: Tensor, rotary: Rotary) -> None:
        """Turns the rows [num_tokens, hidden_size] before the layer into those after it, in place."""
        self.attention.add_to(h, rms_norm(h, self.norm1.weight, self.norm1.epsilon), rotary)
        self.mlp.add_to(h, rms_norm(h, self.norm2.weight, self.norm2.epsilon))


class _RotarySlot:
    """The packed form of the last position embeddings: every layer of a step is called with the same."""

    def __init__(self) -> None:
        self._key: object = None
        self._rotary: Rotary | None = None

    def __call__(self, position_embeddings: tuple[Tensor, Tensor]) -> Rotary:
        """The rotary embedding of a packed batch, from cos and sin [1, num_tokens, rotary_dim]."""
        if self._rotary is None or self._key is not position_embeddings:
            cos, sin = position_embeddings
            self._key, self._rotary = position_embeddings, Rotary(cos[0].float().contiguous(), sin[0].float().contiguous())
        return self._rotary


packed_rotary = _RotarySlot()
