"""`python -m executor_svc.step_inspection`: what each rewrite brings to a decode step on this machine's GPU; prints a table.

Knows the model's rewrites and how a step is called. Starts no service, keeps nothing.

Every line is the same step, in a CUDA graph, with one rewrite in its plain form; the first with all of them, the last with none.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from common.errors import StartupError
from common.logs import setup_logging
from common.settings import ServiceSettings, load_settings, settings_config
from executor_svc.kernels.batch import AttentionBatch, LayerCache
from executor_svc.model.load import LoadedModel, load_model
from executor_svc.settings import DEFAULT_MODEL, default_cache_dir

log = logging.getLogger(__name__)
_BLOCK_SIZE = 16
_REPEATS = 20


class InspectionSettings(ServiceSettings):
    """What to measure."""

    model_config = settings_config("OCTAVO_INSPECT_", "python -m executor_svc.step_inspection")

    model: str = Field(DEFAULT_MODEL, description="the default model's name, a folder, a .gguf file or a hub id")
    cache_dir: Path = Field(default_factory=default_cache_dir, description="where converted models are kept")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and KV")
    load_format: Literal["auto", "random"] = Field("auto", description="random: weights of the config's shape")
    batch_sizes: list[int] = Field([1, 8, 32], description="sequences of a step")
    context: int = Field(1024, ge=1, description="tokens that every sequence has already")
    tune: bool = Field(False, description="measure this model's products first, and keep what is fastest on this machine")


@dataclass(frozen=True)
class Variant:
    """One way to compute the same step.

    Attributes:
        name: for people.
        forward: of the model.
    """

    name: str
    forward: Callable[..., Any]


def main() -> int:
    """Returns the exit status."""
    setup_logging("inspect", "WARNING")
    try:
        settings = load_settings(InspectionSettings, sys.argv[1:])
        for line in inspect_steps(settings):
            print(line, flush=True)
    except StartupError as error:
        print(f"cannot inspect: {error.message}", file=sys.stderr)
        return 1
    return 0


def missing_parts() -> list[str]:
    """What this machine lacks for an inspection."""
    missing = []
    if torch.version.cuda is None:
        missing.append(f"a PyTorch with CUDA (this one is {torch.__version__})")
    elif not torch.cuda.is_available():
        missing.append("a CUDA device that PyTorch can use")
    try:
        import triton  # noqa: F401
    except ImportError:
        missing.append("the package triton")
    return missing


def inspect_steps(settings: InspectionSettings) -> Iterator[str]:
    """Lines of the report, as they come.

    Raises:
        StartupError: the machine lacks something, or the model cannot be loaded.
    """
    missing = missing_parts()
    if missing:
        raise StartupError(f"steps are inspected on a GPU, and this machine lacks {' and '.join(missing)}")
    from executor_svc.kernels.triton.backend import TritonBackend
    from executor_svc.kernels.triton.configs import TUNED_FILE, open_cache
    from executor_svc.model.cuda_rewrite import StackedModel
    from executor_svc.model.cuda_tuning import tune_products
    from executor_svc.model.prepare import prepare_model

    device = torch.device("cuda", torch.cuda.current_device())
    backend = TritonBackend(max_num_seqs=max(settings.batch_sizes))
    needs_weights = settings.load_format != "random"
    folder = prepare_model(
        settings.model, settings.cache_dir, lambda line: print(line, file=sys.stderr), needs_weights=needs_weights
    )
    open_cache(settings.cache_dir / TUNED_FILE)
    started = time.monotonic()
    variants: list[Variant] = []

    def rewrite(model: nn.Module, *, quantization: str = "none") -> object:
        variants.extend(rewrite_variants(model, device))
        return "every rewrite by itself"

    model = load_model(
        folder,
        dtype=settings.dtype,
        load_format=settings.load_format,
        backend=backend,
        device=device,
        rewrites=rewrite,
    )
    yield f"{folder.name}, {model.dtype}, on {torch.cuda.get_device_name(device)}; loaded in {time.monotonic() - started:.1f} s"
    stacked = variants[0].forward
    if settings.tune and isinstance(stacked, StackedModel):
        tune_products(stacked, lambda line: print(line, file=sys.stderr))
    yield f"decode steps in a CUDA graph, {settings.context} tokens of context each"
    yield f"{'sequences':>9s}  {'ms/step':>8s}  {'launches':>8s}  rewrites"
    for size in settings.batch_sizes:
        step = _DecodeStep(model, backend, size, settings.context, device)
        for variant in variants:
            model.module.forward = variant.forward
            try:
                seconds, launches = step.measure()
            except RuntimeError as error:
                yield f"{size:9d}  {'-':>8s}  {'-':>8s}  {variant.name}: {str(error).splitlines()[0][:80]}"
                continue
            yield f"{size:9d}  {seconds * 1e3:8.3f}  {launches:8d}  {variant.name}"


def rewrite_variants(model: Any, device: torch.device) -> list[Variant]:
    """All rewrites, each one off, none. The model keeps the first."""
    from executor_svc.model.cuda_functions import library_product, triton_functions
    from executor_svc.model.cuda_rewrite import StackedModel, rewrite_for_cuda
    from executor_svc.model.stack_functions import torch_attention, torch_norm, torch_product

    own = model.forward
    report = rewrite_for_cuda(model)
    stacked = model.forward
    if not isinstance(stacked, StackedModel):
        return [Variant(f"none ({report})", own)]
    fast = triton_functions(device)
    ways = {
        "all": fast,
        "without kernels that begin early": triton_functions(device, overlap=False),
        "without streamed products": replace(fast, product=library_product),
        "without streamed products and activation with multiply": replace(fast, product=torch_product),
        "without norm with residual": replace(fast, norm=torch_norm),
        "without rope with KV write": replace(fast, attention=torch_attention),
    }
    return [Variant(name, stacked.with_functions(functions)) for name, functions in ways.items()] + [
        Variant("none: transformers' own modules", own)
    ]


class _DecodeStep:
    """A step of sequences that each have one new token."""

    def __init__(self, model: LoadedModel, backend: Any, size: int, context: int, device: torch.device):
        self._model, self._backend = model, backend
        blocks_each = context // _BLOCK_SIZE + 1
        shapes = [(size * blocks_each, spec.num_kv_heads, _BLOCK_SIZE) for spec in model.layer_specs]
        self._caches = {
            spec.layer_idx: LayerCache(
                torch.zeros(*shape, spec.head_dim_k, dtype=model.dtype, device=device),
                torch.zeros(*shape, spec.head_dim_v, dtype=model.dtype, device=device),
            )
            for spec, shape in zip(model.layer_specs, shapes, strict=True)
        }
        tables = torch.arange(size * blocks_each, dtype=torch.int32, device=device).view(size, blocks_each)
        slots = tables[:, context // _BLOCK_SIZE].long() * _BLOCK_SIZE + context % _BLOCK_SIZE
        self._batch = AttentionBatch(
            slot_mapping=slots,
            block_tables=tables,
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=device),
            seq_lens=torch.full((size,), context + 1, dtype=torch.int32, device=device),
            num_decodes=size,
            max_seqlen_q=1,
            max_seqlen_k=context + 1,
            block_size=_BLOCK_SIZE,
        )
        self._ids = torch.ones(size, dtype=torch.int64, device=device)
        self._positions = torch.full((size,), context, dtype=torch.int64, device=device)
        self._rows = torch.arange(size, device=device)

    def measure(self) -> tuple[float, int]:
        """Seconds of a step in a CUDA graph, and how many kernels it launches."""
        from executor_svc.model.forward_context import ForwardContext

        context = ForwardContext(self._batch, self._backend, self._caches)
        with torch.inference_mode():
            for _ in range(2):
                self._model.forward(context, self._ids, self._positions, self._rows)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._model.forward(context, self._ids, self._positions, self._rows)
        graph.replay()
        make_event: Any = torch.cuda.Event
        started, ended = (make_event(enable_timing=True) for _ in range(2))
        started.record()
        for _ in range(_REPEATS):
            graph.replay()
        ended.record()
        ended.synchronize()
        return started.elapsed_time(ended) / 1e3 / _REPEATS, _count_kernels(graph)


def _count_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels of one replay."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events: Sequence[Any] = profile.events() or ()
    kernels = [event for event in events if str(event.device_type).endswith("CUDA")]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in kernels)


if __name__ == "__main__":
    sys.exit(main())
