"""The CPU as a device: its kernels, a pool in host memory, steps that are over when the call returns."""

import mmap
from collections.abc import Callable
from pathlib import Path

import torch

from common.errors import StartupError
from common.shm.available_memory import available_memory_bytes
from executor_svc.core.plan import BatchLimits
from executor_svc.device import Phases, Started, warm_up
from executor_svc.kernels.backend import Backend
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.kvcache.pool import KvPool, block_bytes
from executor_svc.model.load import LoadedModel, Rewrites, cpu_rewrites, no_rewrites
from executor_svc.runner import ModelRunner
from executor_svc.sampling import Sampler
from executor_svc.settings import ExecutorSettings

DEFAULT_KV_BYTES = 1 << 30
DEFAULT_KV_SHARE = 4
DEFAULT_BATCHED_TOKENS = 512
DEFAULT_NUM_SEQS = 256


class CpuDevice:
    """See executor_svc.device.Device."""

    def __init__(self, settings: ExecutorSettings):
        if settings.backend == "triton":
            raise StartupError("backend: triton needs a GPU; a CPU has cpu and torch")
        if settings.dtype == "float16":
            raise StartupError("dtype: float16 needs a GPU; a CPU computes float32 and bfloat16")
        if settings.kv_dtype != "auto":
            raise StartupError(f"kv_dtype: {settings.kv_dtype} needs a GPU; a CPU keeps KV as --dtype says")
        if settings.kv_stored_form != "native":
            raise StartupError(f"kv_stored_form: {settings.kv_stored_form} is made on a GPU; a CPU stores blocks as it has them")
        self.torch_device = torch.device("cpu")
        self.backend = _backend(settings)
        self.rewrites: Rewrites = cpu_rewrites if settings.rewrites else no_rewrites
        self._settings = settings

    def start(self, model: LoadedModel, phases: Phases, progress: Callable[[str], None]) -> Started:
        """See Device."""
        with phases.timed("kv_pool"):
            pool = _allocate_pool(self._settings, model)
        limits = BatchLimits(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            max_num_seqs=self._settings.max_num_seqs or DEFAULT_NUM_SEQS,
            max_num_batched_tokens=self._settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        )
        runner = ModelRunner(
            model,
            pool,
            [spec.layer_idx for spec in model.layer_specs],
            backend=self.backend,
            sampler=Sampler(model.vocab_size),
            limits=limits,
        )
        resident_bytes = _resident_bytes()
        with phases.timed("warm_up"):
            warm_up(runner, limits)
        scratch_bytes = max(0, _resident_bytes() - resident_bytes)
        return Started(
            runner=runner,
            pool=pool,
            blocks=pool,
            limits=limits,
            memory_bytes={"kv_pool": pool.num_bytes, "scratch": scratch_bytes},
            description=f"{torch.get_num_threads()} threads",
        )


def _backend(settings: ExecutorSettings) -> Backend:
    if settings.backend == "torch":
        return TorchBackend()
    from executor_svc.kernels.cpu import CpuBackend

    return CpuBackend()


def _allocate_pool(settings: ExecutorSettings, model: LoadedModel) -> KvPool:
    """The pool that the settings ask for, if the memory is there."""
    bytes_per_block = block_bytes(model.layer_specs, settings.block_size, model.dtype)
    available = available_memory_bytes()
    longest = -(-model.max_model_len // settings.block_size) * bytes_per_block
    wanted = settings.kv_memory_bytes or min(available // DEFAULT_KV_SHARE, max(DEFAULT_KV_BYTES, longest))
    num_blocks = settings.num_blocks or wanted // bytes_per_block
    if num_blocks < 1:
        raise StartupError(f"a KV pool of {wanted:,} bytes holds no block of {bytes_per_block:,} bytes: raise --kv-memory-bytes")
    if num_blocks * bytes_per_block > available:
        raise StartupError(
            f"no memory for a KV pool of {num_blocks * bytes_per_block:,} bytes ({num_blocks} blocks of {bytes_per_block:,}): "
            f"{available:,} bytes are free; lower --kv-memory-bytes or --num-blocks"
        )
    return KvPool(model.layer_specs, num_blocks, settings.block_size, model.dtype)


def _resident_bytes() -> int:
    """Memory of this process that is not swapped out."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
