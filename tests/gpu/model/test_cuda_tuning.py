"""Tuning of a small model's products: measured once, kept in the file, and the model still computes the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from executor_svc.kernels.triton.configs import open_cache
from executor_svc.model.cuda_rewrite import rewrite_for_cuda
from executor_svc.model.cuda_tuning import tune_products
from tests.gpu.model.test_cuda_stack import logits, make_model
from tests.unit.executor_svc.model.tiny import STACKED


@pytest.fixture
def tuned_file(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "kernels.json"
    open_cache(file)
    yield file
    open_cache(None)


def test_products_are_tuned_once(tuned_file: Path) -> None:
    model = make_model(STACKED["llama"](), torch.bfloat16)
    rewrite_for_cuda(model)
    before = logits(model, 1)
    lines: list[str] = []
    with torch.inference_mode():
        tune_products(model.forward, lines.append, rows=(1,))
    assert len(lines) == 5
    written = tuned_file.read_text()
    assert written.count("stream_linear") == 4  # q/k/v and the head are of one shape

    tune_products(model.forward, lines.append, rows=(1,))

    assert tuned_file.read_text() == written
    difference = (logits(model, 1) - before).abs().max() / before.abs().max()
    assert difference < 5e-2
