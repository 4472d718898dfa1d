"""A real model on a GPU, if the environment names its folder (OCTAVO_TEST_MODEL): tokens in float32, logits in bfloat16."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or not os.environ.get("OCTAVO_TEST_MODEL"):
    pytest.skip("needs an NVIDIA GPU, and OCTAVO_TEST_MODEL to name a model folder", allow_module_level=True)

import transformers

from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine, build_engine
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.load import LoadedModel
from executor_svc.model.self_check import packed_batch
from executor_svc.settings import ExecutorSettings
from tests.gpu.driver import Ask, answers, own_greedy_tokens

FOLDER = os.environ["OCTAVO_TEST_MODEL"]
DEVICE = torch.device("cuda", 0)
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "In 1969, three people flew to the Moon. Their names were",
    "Water boils at a lower temperature on a mountain, because",
]


def make_engine(dtype: str) -> Engine:
    settings = ExecutorSettings(model=FOLDER, device="cuda", dtype=dtype, num_blocks=512, max_num_seqs=8, max_model_len=512)
    return build_engine(settings, Path(FOLDER), print)


@pytest.fixture(scope="module")
def module() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, device_map={"": DEVICE}).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    return [tokenizer(text).input_ids for text in TEXTS]


def test_greedy_tokens_in_float32_are_those_of_transformers(module: Any, prompts: list[list[int]]) -> None:
    expected = [own_greedy_tokens(module, prompt, 48) for prompt in prompts]

    assert answers(make_engine("float32"), [Ask(prompt, 48) for prompt in prompts], run_ahead=3) == expected


@torch.inference_mode()
def test_logits_in_bfloat16_are_near_those_in_float32(module: Any, prompts: list[list[int]]) -> None:
    runner = make_engine("bfloat16").runner
    assert isinstance(runner, CudaRunner) and isinstance(runner.model, LoadedModel)
    for prompt in prompts:
        ids = torch.tensor(prompt, device=DEVICE)
        at = torch.arange(len(prompt), device=DEVICE)
        batch = packed_batch([(0, 0, len(prompt))], [list(range(1, 9))], block_size=16, device=DEVICE)
        found = runner.model.compute_logits(ForwardContext(batch, TritonBackend(8), runner.layer_caches), ids, at, at)
        expected = module(input_ids=ids[None], use_cache=False).logits[0]

        assert float((found - expected).abs().max() / expected.abs().max()) < 2e-2
