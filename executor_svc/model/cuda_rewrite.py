"""Rewrites a model for a GPU: its decoder layers become one stack over merged weights, its forward calls the stack.

Knows modules by their form (decoder_forms.py). Does not know kernels, files, batches or requests. A model of another form stays
as transformers made it, and the report says why; whether a rewritten model computes the same, the self-check after it decides.

Merged weights take the place of the parts: q_proj.weight and the like become views of them, so that no weight is held twice and
the model's own modules still compute what they did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from executor_svc.model.cuda_stack import DecoderStack
from executor_svc.model.decoder_forms import (
    UnknownFormError,
    attention_form,
    has_post_norms,
    linear_parts,
    mlp_form,
    model_form,
    norm_part,
    rotary_tables,
)
from executor_svc.model.forward_context import AttentionCall, current
from executor_svc.model.rewrite_report import RewriteReport
from executor_svc.model.stack_functions import StackFunctions
from executor_svc.model.stack_parts import AttentionPart, LayerPart, ProductPart, RotaryTable


@dataclass
class StackOutput:
    """What a rewritten model's forward returns, as far as anybody reads it.

    Attributes:
        logits: [1, num_rows, vocab_size].
    """

    logits: Tensor


class StackedModel:
    """The forward of a rewritten model.

    Attributes:
        stack: of its layers.
        head: from what the stack gives to logits.
    """

    def __init__(self, stack: DecoderStack, head: ProductPart, final_softcap: float | None):
        self.stack = stack
        self.head = head
        self._final_softcap = final_softcap

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool = False,
    ) -> StackOutput:
        """As the model's own forward, within a forward context, over one packed row.

        Args:
            input_ids: int64 [1, num_tokens].
            position_ids: int64 [1, num_tokens].
            logits_to_keep: int64 [num_rows], tokens whose logits are wanted; 0: all.
            use_cache: must be False.
        """
        if use_cache:
            raise ValueError("use_cache: a rewritten model keeps its KV in the paged cache only")
        if isinstance(logits_to_keep, int) and logits_to_keep != 0:
            raise ValueError("logits_to_keep: a rewritten model takes token numbers, or 0 for all")
        keep = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        hidden = self.stack.forward(input_ids[0], position_ids[0], current(), keep)
        return StackOutput(self.logits(hidden)[None])

    def with_functions(self, functions: StackFunctions) -> "StackedModel":
        """The same model, computed in another way."""
        return StackedModel(self.stack.with_functions(functions), self.head, self._final_softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] to [num_rows, vocab_size]."""
        logits = hidden.new_empty(hidden.shape[0], self.head.num_outputs)
        if hidden.shape[0]:
            self.stack.functions.product(hidden, self.head, logits)
        if self._final_softcap is not None:
            logits = torch.tanh(logits.float() / self._final_softcap).mul_(self._final_softcap)
        return logits


def rewrite_for_cuda(
    model: nn.Module, *, quantization: Literal["none", "int8"] = "none", functions: StackFunctions | None = None
) -> RewriteReport:
    """Rewrites the model in place.

    Args:
        model: weights loaded, its attention implementation set to the paged one.
        quantization: models with int8 weights stay as they are.
        functions: that compute the stack; None: the Triton kernels.
    """
    report = RewriteReport()
    if quantization != "none":
        report.skipped["stack"] = f"weights in {quantization} have no kernel here"
        return report
    if functions is None:
        from executor_svc.model.cuda_functions import triton_functions  # brings Triton along

        functions = triton_functions(next(model.parameters()).device)
    try:
        stacked = _stack_model(model, functions, report)
    except UnknownFormError as reason:
        return RewriteReport(skipped={"stack": str(reason)})
    model.forward = stacked
    report.count("stack")
    return report


@torch.inference_mode(False)
@torch.no_grad()
def _stack_model(model: Any, functions: StackFunctions, report: RewriteReport) -> StackedModel:
    form = model_form(model)
    tables = rotary_tables(form.decoder)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1:
        raise UnknownFormError(f"weights are of several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    plans = [_LayerPlan(layer, tables) for layer in form.decoder.layers]
    if len({plan.shape for plan in plans}) != 1:
        raise UnknownFormError("layers differ in shape")
    final_norm = norm_part(form.decoder.norm)
    (weight,), biases = linear_parts(model.lm_head)
    head = ProductPart(weight.data, None if biases is None else biases[0].data)
    # Only now are weights moved: everything has been recognised.
    layers = [plan.carry_out(report) for plan in plans]
    return StackedModel(DecoderStack(form.decoder.embed_tokens, layers, final_norm, functions), head, form.final_softcap)


class _LayerPlan:
    """One layer, recognised and not yet touched."""

    def __init__(self, layer: Any, tables: dict[str | None, RotaryTable]):
        self._layer = layer
        self._has_post_norms = has_post_norms(layer)
        self._attention = attention_form(layer.self_attn)
        self._activation, self._mlp_is_packed = mlp_form(layer.mlp)
        attention = layer.self_attn
        names = ("qkv_proj",) if self._attention.is_packed else ("q_proj", "k_proj", "v_proj")
        self._qkv = [getattr(attention, name) for name in names]
        mlp_names = ("gate_up_proj",) if self._mlp_is_packed else ("gate_proj", "up_proj")
        self._gate_up = [getattr(layer.mlp, name) for name in mlp_names]
        for group in (self._qkv, self._gate_up, [attention.o_proj], [layer.mlp.down_proj]):
            linear_parts(*group)
        self._rotary = tables[None] if None in tables else tables[attention.layer_type]
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self._has_post_norms else []
        self._norms = [norm_part(getattr(layer, name)) for name in norms]
        head_norms = ("q_norm", "k_norm") if self._attention.has_head_norms else ()
        self.head_norms = [norm_part(getattr(attention, name)) for name in head_norms]
        if len({norm.epsilon for norm in self._norms}) != 1 or len({norm.epsilon for norm in self.head_norms}) > 1:
            raise UnknownFormError("norms of a layer differ in epsilon")
        self.head_dim = int(attention.head_dim)
        self._num_heads = attention.o_proj.in_features // self.head_dim
        columns = sum(part.out_features for part in self._qkv)
        self._num_kv_heads = (columns // self.head_dim - self._num_heads) // 2
        self.shape = (columns, attention.o_proj.in_features, self._gate_up[0].in_features, layer.mlp.down_proj.in_features)

    def carry_out(self, report: RewriteReport) -> LayerPart:
        """Merges the layer's weights."""
        attention = self._layer.self_attn
        call = AttentionCall(int(attention.layer_idx), float(attention.scaling), self._attention.window, self._attention.softcap)
        norms, head_norms = self._norms, self.head_norms
        sandwiched = self._has_post_norms
        return LayerPart(
            attention_norm=norms[0],
            qkv=_merged(self._qkv, report),
            attention=AttentionPart(
                call=call,
                num_heads=self._num_heads,
                num_kv_heads=self._num_kv_heads,
                head_dim=self.head_dim,
                rotary=self._rotary,
                q_norm=head_norms[0] if head_norms else None,
                k_norm=head_norms[1] if head_norms else None,
            ),
            output=_merged([attention.o_proj], report),
            mlp_norm=norms[2] if sandwiched else norms[1],
            gate_up=_merged(self._gate_up, report, activation=self._activation),
            down=_merged([self._layer.mlp.down_proj], report),
            post_attention_norm=norms[1] if sandwiched else None,
            post_mlp_norm=norms[3] if sandwiched else None,
        )


def _merged(linears: Sequence[Any], report: RewriteReport, *, activation: str | None = None) -> ProductPart:
    """The layers as one product; each keeps a view of its rows instead of a weight of its own."""
    weights, biases = linear_parts(*linears)
    if len(linears) == 1:
        return ProductPart(weights[0].data, None if biases is None else biases[0].data, activation)
    report.count("merged projections")
    weight = torch.cat([part.data for part in weights])
    bias = None if biases is None else torch.cat([part.data for part in biases])
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return ProductPart(weight, bias, activation)
