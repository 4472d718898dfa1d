"""Recognises what a module computes: by the syntax tree of its forward, or by numbers.

Knows the forms of transformers' Llama family, taken from the installed version. Does not rewrite anything.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2

NORM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def has_form_of(module: nn.Module, pattern: type[nn.Module]) -> bool:
    """Whether the module's forward is, word for word, that of the pattern, and so is the rotary function beside it."""
    if _tree(type(module).forward) != _tree(pattern.forward):
        return False
    if "apply_rotary_pos_emb" not in _source(pattern.forward):
        return True
    return all(
        _tree(_neighbour(type(module), name)) == _tree(_neighbour(pattern, name))
        for name in ("apply_rotary_pos_emb", "rotate_half")
    )


def is_llama_layer(module: nn.Module) -> bool:
    """A decoder layer of two pre-normalised residual blocks."""
    return has_form_of(module, modeling_llama.LlamaDecoderLayer)


def is_llama_mlp(module: nn.Module) -> bool:
    """down(act(gate(x)) * up(x))."""
    return has_form_of(module, modeling_llama.LlamaMLP)


def llama_attention_window(module: Any) -> tuple[bool, int | None]:
    """Whether the module is attention of Llama's form, and its window."""
    if has_form_of(module, modeling_llama.LlamaAttention):
        return True, None
    if has_form_of(module, modeling_mistral.MistralAttention):
        return True, getattr(module.config, "sliding_window", None)
    if has_form_of(module, modeling_qwen2.Qwen2Attention):
        return True, module.sliding_window
    return False, None


def activation_name(module: Any) -> str | None:
    """The name of an activation module or function that the kernels know, found by numbers; None for another."""
    x = torch.linspace(-6, 6, 101)
    found = module(x)
    known: dict[str, Tensor] = {"silu": functional.silu(x), "gelu_tanh": functional.gelu(x, approximate="tanh")}
    return next((name for name, expected in known.items() if torch.allclose(found, expected, rtol=1e-5, atol=1e-6)), None)


def rms_norm_weight(module: nn.Module) -> tuple[Tensor, float] | None:
    """The weight and epsilon with which plain RMS normalisation does what the module does; None if it does something else.

    Families differ in the weight's meaning (w, or 1 + w), so it is found by trying.
    """
    parameters = dict(module.named_parameters())
    if set(parameters) != {"weight"} or list(module.children()) or parameters["weight"].dim() != 1:
        return None
    weight = parameters["weight"].detach()
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float):
        return None
    x = torch.randn(3, weight.shape[0], device=weight.device).to(weight.dtype)
    found = module(x)
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return None
    tolerance = NORM_TOLERANCE.get(weight.dtype)
    for effective in (weight.float(), 1.0 + weight.float()):
        # Small rows show the epsilon, large ones the weight.
        if tolerance is not None and all(
            torch.allclose(
                module((x * size).to(x.dtype)).float(),
                functional.rms_norm((x * size).to(x.dtype).float(), (weight.shape[0],), effective, epsilon),
                rtol=tolerance,
                atol=tolerance,
            )
            for size in (1.0, 1e-3)
        ):
            return effective.contiguous(), epsilon
    return None


def _neighbour(cls: type, name: str) -> Callable[..., Any] | None:
    """A function of the module that the class's forward is written in."""
    found: Callable[..., Any] | None = getattr(sys.modules[inspect.unwrap(cls.forward).__module__], name, None)  # type: ignore[attr-defined]
    return found


def _source(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return ""


@cache  # the same few functions are asked for every layer
def _tree(function: Any) -> str:
    """A function's syntax tree without annotations, decorators and docstrings; empty if there is no source."""
    source = _source(function) if function is not None else ""
    if not source:
        return ""
    tree = ast.parse(source).body[0]
    if not isinstance(tree, ast.FunctionDef):
        return ""
    tree.decorator_list = []
    tree.returns = None
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            node.annotation = ast.Name("Any")
    return ast.dump(tree)
