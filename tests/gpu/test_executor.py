"""The executor on a GPU, end to end in process: tiny random models in float32 give the tokens that transformers gives."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine, build_engine
from executor_svc.model.random_weights import build_random
from executor_svc.settings import ExecutorSettings
from scheduler_svc.core.request import SamplingParams
from tests.gpu.driver import Ask, answers, own_greedy_tokens
from tests.unit.executor_svc.model.tiny import config_of, save_config

DEVICE = torch.device("cuda", 0)
FAMILIES: dict[str, Any] = {
    "llama": lambda: config_of("LlamaConfig"),
    "qwen2": lambda: config_of("Qwen2Config"),
    "qwen3": lambda: config_of("Qwen3Config", head_dim=16),
    "mistral": lambda: config_of("MistralConfig", sliding_window=19, head_dim=16),
    "gemma3": lambda: config_of("Gemma3TextConfig", head_dim=16, sliding_window=19, query_pre_attn_scalar=20),
    "phi3": lambda: config_of("Phi3Config", sliding_window=None),
}
PROMPT_LENS = (3, 17, 40, 1, 64, 90, 33)
NUM_TOKENS = 24


def make_engine(folder: Path, **changes: object) -> Engine:
    values: dict[str, object] = {
        "model": str(folder),
        "device": "cuda",
        "dtype": "float32",
        "load_format": "random",
        "num_blocks": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
    }
    return build_engine(ExecutorSettings.model_validate({**values, **changes}), folder, print)


def make_asks(**changes: Any) -> list[Ask]:
    rng = random.Random(5)
    return [Ask([rng.randrange(3, 128) for _ in range(length)], NUM_TOKENS, **changes) for length in PROMPT_LENS]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(FAMILIES[family](), tmp_path_factory.mktemp(family) / family)


@pytest.fixture(scope="module")
def expected(family: str) -> list[list[int]]:
    with torch.no_grad():
        module = build_random(FAMILIES[family](), torch.float32, 0, DEVICE).eval()
    return [own_greedy_tokens(module, ask.prompt, ask.num_tokens) for ask in make_asks()]


@pytest.mark.parametrize("rewrites", [True, False])
def test_greedy_tokens_are_those_of_transformers(folder: Path, expected: list[list[int]], rewrites: bool) -> None:
    """Steps by graphs and kernel by kernel, one after the other and ahead of results."""
    engine = make_engine(folder, rewrites=rewrites)
    assert isinstance(engine.runner, CudaRunner) and engine.runner.graphs is not None

    assert answers(engine, make_asks(), run_ahead=1) == expected
    assert answers(engine, make_asks(), run_ahead=4) == expected
    assert answers(engine, make_asks(), num_blocks=24) == expected, "with preemption"
    engine.runner.graphs = None
    assert answers(engine, make_asks(), run_ahead=1) == expected, "without graphs"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield make_engine(save_config(FAMILIES["llama"](), tmp_path_factory.mktemp("llama") / "llama"))


SAMPLINGS = {
    "drawn": SamplingParams(temperature=1.3, seed=5),
    "filtered": SamplingParams(temperature=2.0, top_k=20, top_p=0.9, min_p=0.01, seed=9),
    "top-p": SamplingParams(temperature=1.5, top_p=0.7, seed=9),
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
    "biased": SamplingParams(temperature=0.0, logit_bias={3: 4.0, 7: -3.0}),
}


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_every_kind_of_sampling_gives_the_same_tokens_whatever_the_schedule(llama: Engine, name: str, tmp_path: Path) -> None:
    asks = make_asks(sampling=SAMPLINGS[name])
    eager = make_engine(save_config(FAMILIES["llama"](), tmp_path / "llama"), cuda_graphs=False, backend="torch")
    expected = answers(eager, asks, run_ahead=1)

    assert answers(llama, asks, run_ahead=1) == expected
    assert answers(llama, asks, run_ahead=3) == expected
    assert answers(llama, asks, run_ahead=3, num_blocks=24) == expected, "with preemption"


def test_cancelled_requests_change_nobody_elses_tokens(llama: Engine) -> None:
    asks = make_asks()
    expected = answers(llama, asks)
    some = [Ask(ask.prompt, ask.num_tokens, cancel_after=7 if number % 2 else None) for number, ask in enumerate(asks)]

    found = answers(llama, some, run_ahead=3)

    assert found[::2] == expected[::2]
    assert all(len(tokens) < NUM_TOKENS for tokens in found[1::2])


def test_the_start_says_where_memory_and_time_went(llama: Engine) -> None:
    assert {"weights", "kv_pool", "scratch", "graphs"} <= set(llama.info.memory_bytes)
    phases = [phase.name for phase in llama.info.startup_phases]
    assert {"random_weights", "self_check", "dry_run", "kv_pool", "warm_up", "graphs"} <= set(phases)


def test_without_a_number_the_pool_takes_what_is_left(tmp_path: Path) -> None:
    engine = make_engine(save_config(FAMILIES["llama"](), tmp_path / "llama"), num_blocks=0, gpu_memory_utilization=0.3)

    assert engine.info.num_blocks > 1000
    assert sum(engine.info.memory_bytes.values()) < 0.3 * torch.cuda.get_device_properties(0).total_memory
