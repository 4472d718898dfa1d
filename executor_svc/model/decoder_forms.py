"""Recognises whole decoders: which modules hold the norms, products and attention of every layer, and how they are joined.

Knows the forms of transformers' Llama, Mistral, Qwen, Gemma and Phi families, word for word as installed (rewrite_forms.py);
never a model's name. Does not rewrite. What is of no known form raises UnknownFormError with the reason.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from executor_svc.model.rewrite_forms import activation_name, has_form_of, rms_norm_weight
from executor_svc.model.stack_parts import NormPart, RotaryTable

_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
"""Types of rotary embedding whose frequencies do not depend on a sequence's length."""


class UnknownFormError(Exception):
    """A module computes something that the stack does not; the text says which and what."""


@dataclass(frozen=True)
class AttentionForm:
    """How an attention module reads its inputs.

    Attributes:
        window, softcap: as AttentionCall.
        has_head_norms: whether q_norm and k_norm are applied to heads.
        is_packed: whether qkv_proj stands for q_proj, k_proj and v_proj.
    """

    window: int | None
    softcap: float | None
    has_head_norms: bool
    is_packed: bool


@dataclass(frozen=True)
class ModelForm:
    """How a causal language model joins its parts.

    Attributes:
        decoder: the module with embed_tokens, layers, norm and rotary_emb.
        final_softcap: logits become softcap * tanh(logits / softcap); None: they do not.
    """

    decoder: Any
    final_softcap: float | None


def model_form(model: Any) -> ModelForm:
    """Of a causal language model."""
    if has_form_of(model, modeling_llama.LlamaForCausalLM):
        final_softcap = None
    elif has_form_of(model, modeling_gemma2.Gemma2ForCausalLM):
        final_softcap = model.config.final_logit_softcapping
    else:
        raise UnknownFormError(f"{type(model).__name__} joins its parts in another way")
    decoder = model.model
    patterns = (
        modeling_llama.LlamaModel,
        modeling_mistral.MistralModel,
        modeling_qwen2.Qwen2Model,
        modeling_gemma2.Gemma2Model,
        modeling_gemma3.Gemma3TextModel,
    )
    if not any(has_form_of(decoder, pattern) for pattern in patterns):
        raise UnknownFormError(f"{type(decoder).__name__} joins its layers in another way")
    return ModelForm(decoder, final_softcap)


def has_post_norms(layer: nn.Module) -> bool:
    """Whether what a layer's blocks compute is normalised before it is added."""
    if has_form_of(layer, modeling_llama.LlamaDecoderLayer) or has_form_of(layer, modeling_phi3.Phi3DecoderLayer):
        return False
    if has_form_of(layer, modeling_gemma2.Gemma2DecoderLayer):
        return True
    raise UnknownFormError(f"{type(layer).__name__} joins its blocks in another way")


def attention_form(module: Any) -> AttentionForm:
    """Of a layer's attention."""
    if getattr(module, "is_causal", True) is False:
        raise UnknownFormError(f"{type(module).__name__} is not causal")
    config_window = getattr(module.config, "sliding_window", None)
    window = getattr(module, "sliding_window", None)
    if has_form_of(module, modeling_llama.LlamaAttention):
        return AttentionForm(None, None, has_head_norms=False, is_packed=False)
    if has_form_of(module, modeling_mistral.MistralAttention):
        return AttentionForm(config_window, None, has_head_norms=False, is_packed=False)
    if has_form_of(module, modeling_qwen2.Qwen2Attention):
        return AttentionForm(window, None, has_head_norms=False, is_packed=False)
    if has_form_of(module, modeling_qwen3.Qwen3Attention) or has_form_of(module, modeling_gemma3.Gemma3Attention):
        return AttentionForm(window, None, has_head_norms=True, is_packed=False)
    if has_form_of(module, modeling_gemma2.Gemma2Attention):
        return AttentionForm(window, module.attn_logit_softcapping, has_head_norms=False, is_packed=False)
    if has_form_of(module, modeling_phi3.Phi3Attention):
        return AttentionForm(config_window, None, has_head_norms=False, is_packed=True)
    raise UnknownFormError(f"{type(module).__name__} computes attention in another way")


def mlp_form(module: Any) -> tuple[str, bool]:
    """The activation's name, and whether gate_up_proj stands for gate_proj and up_proj."""
    if has_form_of(module, modeling_llama.LlamaMLP):
        activation, is_packed = module.act_fn, False
    elif has_form_of(module, modeling_phi3.Phi3MLP):
        activation, is_packed = module.activation_fn, True
    else:
        raise UnknownFormError(f"{type(module).__name__} computes something else")
    name = activation_name(activation)
    if name is None:
        raise UnknownFormError(f"{type(module).__name__} has an activation without a kernel")
    return name, is_packed


def norm_part(module: nn.Module) -> NormPart:
    """Of an RMS norm."""
    found = rms_norm_weight(module)
    if found is None:
        raise UnknownFormError(f"{type(module).__name__} is no RMS norm")
    return NormPart(*found)


def linear_parts(*modules: Any) -> tuple[list[Tensor], list[Tensor] | None]:
    """Weights and biases of plain linear layers with one input, all with or all without a bias."""
    for module in modules:
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
            raise UnknownFormError(f"{type(module).__name__} is no plain linear layer")
    if len({(module.in_features, module.bias is None) for module in modules}) != 1:
        raise UnknownFormError("linear layers of one input differ in width or bias")
    return [module.weight for module in modules], None if modules[0].bias is None else [module.bias for module in modules]


@torch.no_grad()
def rotary_tables(decoder: Any) -> dict[str | None, RotaryTable]:
    """Cosines and sines of every position that the model has, by layer type; None: of all layers.

    Computed by the model's own rotary module in float32.
    """
    rotary = decoder.rotary_emb
    if not hasattr(rotary, "rope_type"):
        raise UnknownFormError(f"{type(rotary).__name__} is no rotary embedding of transformers")
    by_type = "layer_type" in inspect.signature(rotary.forward).parameters
    rope_types = rotary.rope_type if by_type else {None: rotary.rope_type}
    unknown = sorted({str(rope_type) for rope_type in rope_types.values()} - _STATIC_ROPE)
    if unknown:
        raise UnknownFormError(f"rotary embedding of type {', '.join(unknown)} depends on a sequence's length")
    device = next(decoder.parameters()).device
    positions = torch.arange(int(decoder.config.max_position_embeddings), device=device)[None]
    x = torch.empty(0, dtype=torch.float32, device=device)
    tables = {}
    for layer_type in rope_types:
        cos, sin = rotary(x, positions, *(() if layer_type is None else (layer_type,)))
        tables[layer_type] = RotaryTable(cos[0].float().contiguous(), sin[0].float().contiguous())
    return tables
