"""Rewrites of a model's module tree that make it faster on the CPU and change nothing else.

Knows modules by what they compute (rewrite_forms.py), never by a model's name. Does not know weights' files, batches or
requests. Each rewrite compares itself with the original on random input; where it differs, or where a module is of no
known form, the module stays and the report says so.

    every decoder layer of Llama's form      one call per block: norm, merged products, attention, residual
    other q/k/v and gate/up projections      one product instead of three or two
    other linear layers, tied tables         packed for the streaming kernels, one copy of the weights
    other RMS norms                          one call

A bfloat16 model is rewritten if all its layers are of Llama's form, with a residual stream in float32; of others only norms.
"""

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.cpu.packed_weight import PackedWeight, pack
from executor_svc.kernels.cpu.plain_weight import has_bfloat16_products
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.model.forward_context import AttentionCall, ForwardContext, use
from executor_svc.model.fused_stack import FusedStack, StackedLayer
from executor_svc.model.quantize import quantize_weight
from executor_svc.model.rewrite_forms import (
    activation_name,
    is_llama_layer,
    is_llama_mlp,
    llama_attention_window,
    rms_norm_weight,
)
from executor_svc.model.rewrite_modules import (
    FloatEmbedding,
    FusedAttention,
    FusedLayer,
    FusedMlp,
    FusedNorm,
    MergedLinears,
    MergedPart,
    PackedEmbedding,
    PackedLinear,
)
from executor_svc.model.rewrite_report import RewriteReport
from executor_svc.model.self_check import packed_batch

_TOLERANCE = 1e-4
"""Largest difference of a rewritten module's result, relative to the result's largest value."""
_TABLES = (nn.Embedding, PackedEmbedding)
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.inference_mode(False)
@torch.no_grad()
def rewrite_model(model: nn.Module, *, quantization: Literal["none", "int8"] = "none") -> RewriteReport:
    """Rewrites the model in place.

    Args:
        model: on the CPU, weights loaded, its attention implementation set to the paged one.
        quantization: "int8" replaces the weights of linear layers and of tables tied to them by int8.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    rewriter = _Rewriter(quantization == "int8", keep_plain=dtypes == {torch.bfloat16} and has_bfloat16_products())
    is_llama_bfloat16 = dtypes == {torch.bfloat16} and quantization == "none" and _is_llama(model)
    rewriter.norms(model)
    if dtypes == {torch.float32} or quantization == "int8":
        if dtypes == {torch.float32}:
            rewriter.layers(model)
            rewriter.stacks(model)
        rewriter.merges(model)
        rewriter.linears(model)
    elif is_llama_bfloat16:
        rewriter.layers(model)
        rewriter.merges(model)
        rewriter.linears(model)
        rewriter.float_residual(model)
        rewriter.stacks(model)
    else:
        rewriter.report.skipped["packed linear layers"] = "bfloat16, and not all layers are of Llama's form"
    return rewriter.report


class _Rewriter:
    """One run over a model."""

    def __init__(self, is_int8: bool, *, keep_plain: bool):
        self.is_int8 = is_int8
        self.keep_plain = keep_plain and not is_int8
        self.report = RewriteReport()

    def norms(self, model: nn.Module) -> None:
        """Replaces RMS norms."""
        for parent, name, child in _children(model):
            if type(child).__name__.endswith("RMSNorm"):
                found = rms_norm_weight(child)
                if found is None:
                    self.report.skipped["norms"] = f"{type(child).__name__} is no plain RMS norm"
                    continue
                fused = FusedNorm(*found)
                x = torch.randn(3, found[0].shape[0]).to(next(child.parameters()).dtype)
                if self._agrees("norms", child(x), fused(x), 1e-2 if x.dtype == torch.bfloat16 else _TOLERANCE):
                    setattr(parent, name, fused)
                    self.report.count("norms")

    def layers(self, model: nn.Module) -> None:
        """Replaces attention and MLP of Llama's form, and the forward of layers made of both."""
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if name == "mlp" and is_llama_mlp(child):
                    self._replace_mlp(module, name, child)
                elif name == "self_attn":
                    is_llama, window = llama_attention_window(child)
                    if is_llama:
                        self._replace_attention(module, name, child, window)
        for layer in model.modules():
            parts = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")]
            kinds = (FusedNorm, FusedNorm, FusedAttention, FusedMlp)
            if all(isinstance(part, kind) for part, kind in zip(parts, kinds, strict=True)) and is_llama_layer(layer):
                fused = FusedLayer(layer)
                call = fused.attention.call
                x, position_embeddings = _random_rows(fused.attention.qkv.in_features, fused.attention.head_dim)
                with use(_small_context(call.layer_idx, fused.attention.num_kv_heads, fused.attention.head_dim)):
                    arguments: dict[str, Any] = {"hidden_states": x, "position_embeddings": position_embeddings}
                    expected, found = layer(**arguments), fused(**arguments)
                if self._agrees("layers", expected, found):
                    layer.forward = fused
                    self.report.count("layers")

    def stacks(self, model: nn.Module) -> None:
        """Makes lists of fused layers one call each; the self-check after the rewrites compares what they compute."""
        for module in model.modules():
            layers: list[Any] = list(module) if isinstance(module, nn.ModuleList) else []
            fused = [layer.forward for layer in layers if isinstance(layer.forward, FusedLayer)]
            if len(fused) < 2 or len(fused) != len(layers) or not FusedStack.fits(fused):
                continue
            stack = FusedStack(fused)
            for i, layer in enumerate(layers):
                layer.forward = StackedLayer(stack, is_first=i == 0)
            self.report.count("stacks")

    def merges(self, model: nn.Module) -> None:
        """Merges linear layers that are fed with one input."""
        for module in list(model.modules()):
            for names in _MERGED:
                parts: list[Any] = [getattr(module, name, None) for name in names]
                if not _can_merge(parts):
                    continue
                weight = self._pack(*parts)
                merged = MergedLinears(weight, [part.out_features for part in parts])
                x = torch.randn(3, weight.in_features).to(parts[0].weight.dtype)
                expected = torch.cat([self._reference(part, x) for part in parts], dim=-1)
                found = torch.cat([merged.part(i, x) for i in range(len(parts))], dim=-1)
                if self._agrees("merged projections", expected, found):
                    for i, name in enumerate(names):
                        setattr(module, name, MergedPart(merged, i))
                    self.report.count("merged projections")

    def linears(self, model: nn.Module) -> None:
        """Packs the linear layers that are left, and the plain tables that share their weight with one."""
        packed: dict[int, PackedWeight] = {}
        for parent, name, child in _children(model):
            if not _is_plain_linear(child):
                continue
            # In a bfloat16 model this is the head: few rows, and logits must not be rounded to bfloat16.
            weight = self._pack(child, keep_plain=False)
            linear = PackedLinear(weight)
            x = torch.randn(3, child.in_features).to(child.weight.dtype)
            if self._agrees("linear layers", self._reference(child, x), linear(x)):
                packed[child.weight.data_ptr()] = weight
                setattr(parent, name, linear)
                self.report.count("linear layers")
        for parent, name, child in _children(model):
            tied = packed.get(child.weight.data_ptr()) if type(child) is nn.Embedding else None
            if tied is not None:
                setattr(parent, name, PackedEmbedding(tied, child.weight.dtype))
                self.report.count("tied tables")

    def float_residual(self, model: nn.Module) -> None:
        """Lets hidden states between fused layers be float32; takes fused layers back if something else would meet them."""
        tables = [(parent, name, child) for parent, name, child in _children(model) if isinstance(child, _TABLES)]
        left = {id(parameter) for parameter in model.parameters()}
        left -= {id(parameter) for _, _, table in tables for parameter in table.parameters()}
        layers: list[Any] = [module for module in model.modules() if hasattr(module, "self_attn")]
        if not left and all(isinstance(layer.forward, FusedLayer) for layer in layers):
            for parent, name, table in tables:
                setattr(parent, name, FloatEmbedding(table))
            self.report.count("float32 residual streams")
            return
        self.report.skipped["float32 residual stream"] = "some of the model's weights have no kernel"
        for layer in layers:
            if isinstance(layer.forward, FusedLayer):
                del layer.forward
        self.report.counts.pop("layers", None)

    def _replace_mlp(self, parent: nn.Module, name: str, mlp: Any) -> None:
        parts = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        activation = activation_name(mlp.act_fn)
        if activation is None or not all(_is_plain_linear(part) for part in parts) or not _can_merge(parts[:2]):
            self.report.skipped["mlps"] = f"{type(mlp).__name__} has an activation or layers without a kernel"
            return
        fused = FusedMlp(self._pack(mlp.gate_proj, mlp.up_proj, activation=activation), self._pack(mlp.down_proj))
        x = torch.randn(1, 3, mlp.gate_proj.in_features)
        gated = mlp.act_fn(self._reference(mlp.gate_proj, x)) * self._reference(mlp.up_proj, x)
        if self._agrees("mlps", self._reference(mlp.down_proj, gated), fused(x)):
            setattr(parent, name, fused)
            self.report.count("mlps")

    def _replace_attention(self, parent: nn.Module, name: str, attention: Any, window: int | None) -> None:
        parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        if not all(_is_plain_linear(part) for part in parts) or not _can_merge(parts[:3]):
            self.report.skipped["attentions"] = f"{type(attention).__name__} has projections that are no plain linear layers"
            return
        head_dim = attention.head_dim
        num_kv_heads = attention.k_proj.out_features // head_dim
        call = AttentionCall(attention.layer_idx, float(attention.scaling), window)
        fused = FusedAttention(self._pack(*parts[:3]), self._pack(attention.o_proj), call, head_dim, num_kv_heads)
        x, position_embeddings = _random_rows(attention.q_proj.in_features, head_dim)
        if self.is_int8:
            # The original has other weights: the products are checked one by one, the attention with its own.
            for weight, layers in ((fused.qkv, parts[:3]), (fused.output, parts[3:])):
                rows = torch.randn(3, weight.in_features)
                expected = torch.cat([self._reference(layer, rows) for layer in layers], dim=-1)
                if not self._agrees("attentions", expected, weight.apply(rows)):
                    return
        else:
            with use(_small_context(call.layer_idx, num_kv_heads, head_dim)):
                original = _in_float32(attention)
                expected = original(hidden_states=x, position_embeddings=position_embeddings, attention_mask=None)[0]
                found = fused(hidden_states=x, position_embeddings=position_embeddings)[0]
            if not self._agrees("attentions", expected, found):
                return
        setattr(parent, name, fused)
        self.report.count("attentions")

    def _pack(self, *layers: nn.Linear, activation: str | None = None, keep_plain: bool = True) -> PackedWeight:
        """The layers' weights as one; held plain too if that is asked for and of use in this model."""
        values = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
        bias = torch.cat([layer.bias.detach() for layer in layers]) if layers[0].bias is not None else None
        if not self.is_int8:
            return pack(values, bias=bias, activation=activation, keep_plain=keep_plain and self.keep_plain)
        quantized = quantize_weight(values)
        return pack(quantized.values, scales=quantized.scales, bias=bias, activation=activation)

    def _reference(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """What the layer must give with the weights that it is going to have."""
        weight = quantize_weight(layer.weight.detach()).dequantized() if self.is_int8 else layer.weight.detach().float()
        return functional.linear(x.float(), weight, None if layer.bias is None else layer.bias.detach().float())

    def _agrees(self, name: str, expected: Tensor, found: Tensor, tolerance: float | None = None) -> bool:
        """Whether two results are equal but for rounding; the report says so if not."""
        if tolerance is None:
            tolerance = _TOLERANCE if found.dtype == torch.float32 else 1e-2
        difference = (expected.float() - found.float()).abs().max() / expected.float().abs().max().clamp(min=1e-30)
        if difference <= tolerance:
            return True
        self.report.skipped[name] = f"the rewritten module differs by {float(difference):.2g}"
        return False


def _children(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """(parent, name, child) of the whole tree, in order."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]


def _is_llama(model: nn.Module) -> bool:
    """Whether all decoder layers are of Llama's form."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "self_attn")]
    return bool(layers) and all(
        is_llama_layer(layer) and is_llama_mlp(layer.mlp) and llama_attention_window(layer.self_attn)[0] for layer in layers
    )


def _in_float32(module: nn.Module) -> nn.Module:
    """The module, or a copy if its weights are something else: what its replacement is compared with."""
    return module if all(p.dtype == torch.float32 for p in module.parameters()) else copy.deepcopy(module).float()


def _is_plain_linear(module: Any) -> bool:
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def _can_merge(parts: Any) -> bool:
    """Whether the parts are plain linear layers of one width, all with or all without a bias."""
    if not all(_is_plain_linear(part) for part in parts):
        return False
    return len({(part.in_features, part.bias is None) for part in parts}) == 1


def _random_rows(hidden_size: int, head_dim: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Five tokens' hidden states [1, 5, hidden_size], and their rotary embedding."""
    angles = torch.randn(1, 5, head_dim // 2).repeat(1, 1, 2)
    return torch.randn(1, 5, hidden_size), (angles.cos(), angles.sin())


def _small_context(layer_idx: int, num_kv_heads: int, head_dim: int) -> ForwardContext:
    """A step of one sequence of five tokens in a cache of one layer."""
    batch = packed_batch([(0, 0, 5)], [[1]], block_size=16)
    cache = LayerCache(torch.zeros(2, num_kv_heads, head_dim, 16), torch.zeros(2, num_kv_heads, 16, head_dim))
    return ForwardContext(batch, TorchBackend(), {layer_idx: cache})
