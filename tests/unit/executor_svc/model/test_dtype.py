"""One rule for the dtype of a model, whoever asks and however its config says its own."""

import subprocess
import sys

import pytest
import torch

from executor_svc.model.dtype import ModelDtype, model_dtype


@pytest.mark.parametrize(
    ("asked", "own", "dtype"),
    [
        ("auto", "float16", torch.float16),
        ("auto", "float32", torch.bfloat16),
        ("auto", None, torch.bfloat16),
        ("auto", "float8_e4m3fn", torch.bfloat16),
        ("float16", "bfloat16", torch.float16),
        ("float32", "bfloat16", torch.float32),
    ],
)
def test_on_a_gpu_auto_is_the_models_own_if_that_has_16_bits(asked: ModelDtype, own: str | None, dtype: torch.dtype) -> None:
    assert model_dtype(asked, own, "cuda") == dtype
    assert model_dtype(asked, own and getattr(torch, own), "cuda") == dtype, "as transformers reads it"


def test_on_a_cpu_auto_is_float32() -> None:
    assert model_dtype("auto", "bfloat16", "cpu") == torch.float32
    assert model_dtype("bfloat16", "float32", "cpu") == torch.bfloat16


def test_the_rule_does_not_bring_transformers_along() -> None:
    code = "import executor_svc.model.dtype, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
