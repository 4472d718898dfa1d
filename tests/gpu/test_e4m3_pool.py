"""An executor on a GPU whose pool keeps e4m3: the same tokens by graphs and without, and logits near those of an exact pool."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs an NVIDIA GPU that converts e4m3", allow_module_level=True)

from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.load import LoadedModel
from executor_svc.model.self_check import packed_batch
from tests.gpu.driver import answers
from tests.gpu.test_executor import make_asks, make_engine
from tests.unit.executor_svc.model.tiny import config_of, save_config

FAMILIES = {
    "llama": lambda: config_of("LlamaConfig"),
    "gemma3": lambda: config_of("Gemma3TextConfig", head_dim=16, sliding_window=19, query_pre_attn_scalar=20),
}


@torch.inference_mode()
def logits_of(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """Logits at every position, each token a decode behind the ones before it: all of them read the pool."""
    runner = engine.runner
    assert isinstance(runner, CudaRunner) and isinstance(runner.model, LoadedModel)
    found = []
    for at, token in enumerate(prompt):
        batch = packed_batch([(0, at, at + 1)], [list(range(1, 9))], block_size=16, device=torch.device("cuda"))
        context = ForwardContext(batch, TritonBackend(8), runner.layer_caches)
        row = torch.zeros(1, dtype=torch.int64, device="cuda")
        found.append(runner.model.compute_logits(context, row + token, row + at, row)[0].float())
    return torch.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_how_steps_are_run(family: str, tmp_path: Path) -> None:
    engine = make_engine(save_config(FAMILIES[family](), tmp_path / family), kv_dtype="fp8_e4m3")
    assert isinstance(engine.runner, CudaRunner) and engine.runner.graphs is not None
    found = answers(engine, make_asks(), run_ahead=1)

    assert answers(engine, make_asks(), run_ahead=4) == found
    engine.runner.graphs = None
    assert answers(engine, make_asks(), run_ahead=1) == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_near_those_of_an_exact_pool(dtype: str, tmp_path: Path) -> None:
    folder = save_config(FAMILIES["llama"](), tmp_path / "llama")
    exact, rounded = make_engine(folder, dtype=dtype), make_engine(folder, dtype=dtype, kv_dtype="fp8_e4m3")
    prompt = list(make_asks()[5].prompt)
    wanted, found = logits_of(exact, prompt), logits_of(rounded, prompt)

    assert exact.info.kv_dtype == dtype
    assert rounded.info.kv_dtype == "fp8_e4m3"
    assert exact.info.kv_fingerprint != rounded.info.kv_fingerprint
    assert 0 < float((found - wanted).abs().max() / wanted.abs().max()) < 5e-2
    rounded.pool.check_integrity()
