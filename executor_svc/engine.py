"""Start-up: from settings to a runner that has run. Knows every part of the executor and the order in which they are made."""

import logging
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from common.block_hash import kv_fingerprint
from common.degraded import DegradedPaths
from common.errors import StartupError
from common.ids import BlockId, SeqId
from common.model_spec import folder_name, public_name
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity
from common.shm.available_memory import available_memory_bytes
from executor_svc.clients.kvstore import BlockStoreClient
from executor_svc.core.plan import BatchLimits, Chunk, NewSequence, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.cpu_cores import usable_cores
from executor_svc.kernels.backend import Backend
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.kvcache.pool import KvPool, block_bytes
from executor_svc.model.load import LoadedModel, load_model
from executor_svc.runner import ModelRunner
from executor_svc.sampling import Sampler
from executor_svc.settings import ExecutorSettings
from executor_svc.transfer import BlockStore
from octavo.executor.v1 import executor_service_pb2 as pb

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 2.0
DEFAULT_KV_BYTES = 1 << 30
DEFAULT_KV_SHARE = 4
KV_LAYOUT_VERSION = "block-major/1"


@dataclass(frozen=True)
class Engine:
    """An executor without a wire.

    Attributes:
        store: None without a block store.
        info: what GetExecutorInfo answers.
    """

    runner: ModelRunner
    pool: KvPool
    store: BlockStore | None
    info: pb.ExecutorInfo


def build_engine(
    settings: ExecutorSettings, folder: Path, progress: Callable[[str], None], phases_before: Mapping[str, float] | None = None
) -> Engine:
    """Loads, checks, allocates and warms up.

    Args:
        settings: of this executor.
        folder: of settings.model, from prepare_model.
        progress: called with lines for people.
        phases_before: seconds of what start-up has done already.

    Raises:
        StartupError: with what is wrong and which setting to change.
    """
    phases = _Phases(phases_before or {})
    torch.set_num_threads(settings.num_threads or usable_cores())
    progress(f"loading {folder}")
    backend = _backend(settings)
    with phases.timed("load"):
        model = load_model(
            folder,
            dtype=settings.dtype,
            quantization=settings.quantization,
            load_format=settings.load_format,
            seed=settings.seed,
            backend=backend,
            max_model_len=settings.max_model_len or None,
        )
    with phases.timed("kv_pool"):
        pool = _allocate_pool(settings, model)
    limits = BatchLimits(
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
    )
    runner = ModelRunner(
        model,
        pool,
        [spec.layer_idx for spec in model.layer_specs],
        backend=backend,
        sampler=Sampler(model.vocab_size),
        limits=limits,
    )
    resident_bytes = _resident_bytes()
    with phases.timed("warm_up"):
        _warm_up(runner, limits)
    scratch_bytes = max(0, _resident_bytes() - resident_bytes)
    fingerprint = kv_fingerprint(
        {
            **model.fingerprint_parts,
            "block_size": str(pool.block_size),
            "layout": f"{KV_LAYOUT_VERSION} {backend.kv_layout_version} {pool.block_bytes}",
        }
    )
    store = _connect_store(settings, fingerprint, pool)
    transport, reason = store.transport if store is not None else ("", "no block store is configured")
    info = pb.ExecutorInfo(
        executor_id=settings.executor_id,
        model=public_name(settings.model_name or folder_name(folder)),
        backend=backend.name,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_fingerprint=fingerprint,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        block_bytes=pool.block_bytes,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        memory_bytes={"weights": _weight_bytes(model), "kv_pool": pool.num_bytes, "scratch": scratch_bytes},
        kv_transport=transport,
        kv_transport_reason=reason,
        startup_phases=[pb.Phase(name=name, seconds=seconds) for name, seconds in phases.seconds(model.phases)],
    )
    progress(
        f"ready: {info.dtype} on {info.backend}, {torch.get_num_threads()} threads, {pool.num_blocks} blocks of "
        f"{pool.block_size} tokens ({pool.num_bytes >> 20} MiB); "
        + ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in info.startup_phases)
    )
    return Engine(runner, pool, store, info)


class _Phases:
    """Seconds by phase, in order."""

    def __init__(self, before: Mapping[str, float]):
        self._seconds = dict(before)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Times the with block."""
        started = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - started

    def seconds(self, load_parts: dict[str, float]) -> list[tuple[str, float]]:
        """All phases; "load" is split into the loader's own parts and the rest."""
        found: list[tuple[str, float]] = []
        for name, seconds in self._seconds.items():
            if name == "load":
                found += load_parts.items()
                seconds -= sum(load_parts.values())
            found.append((name, max(0.0, seconds)))
        return found


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


def _warm_up(runner: ModelRunner, limits: BatchLimits) -> None:
    """Runs each kind of step once, which compiles kernels and takes the scratch memory of the largest step.

    The kinds: a chunk that samples nothing, the end of a prompt, a decode.

    Raises:
        StartupError: a step failed.
    """
    num_tokens = min(limits.max_num_batched_tokens, limits.max_model_len - 2, (limits.num_blocks * limits.block_size) - 2)
    if num_tokens < 1:
        raise StartupError("max_num_batched_tokens, max_model_len and the KV pool leave no room for a single step")
    blocks = [BlockId(i) for i in range(-(-(num_tokens + 2) // limits.block_size))]
    new = NewSequence(SeqId(1), [1] * (num_tokens + 1), num_tokens + 1, 0, blocks, SamplingParams(temperature=0.0))
    steps = [
        StepPlan(step_id=1, new_sequences=[new], chunks=[Chunk(SeqId(1), num_tokens)]),
        StepPlan(step_id=2, chunks=[Chunk(SeqId(1), 1)]),
        StepPlan(step_id=3, chunks=[Chunk(SeqId(1), 1)]),
    ]
    for step in steps:
        outcome = runner.execute(step)
        if outcome.failures:
            raise StartupError(f"the warm-up failed: {outcome.failures[0].message}")
    runner.reset()


def _connect_store(settings: ExecutorSettings, fingerprint: bytes, pool: KvPool) -> BlockStore | None:
    if not settings.kvstore:
        return None
    store = BlockStoreClient(
        Address.parse(settings.kvstore),
        client_id=settings.executor_id,
        layout_fingerprint=fingerprint,
        block_bytes=pool.block_bytes,
        transport=settings.kv_transport,
        degraded=DegradedPaths(),
        security=ChannelSecurity(tls_ca=settings.kvstore_tls_ca, token=settings.kvstore_token.get_secret_value()),
    )
    store.connect(CONNECT_TIMEOUT_S)
    return store


def _resident_bytes() -> int:
    """Memory of this process that is not swapped out."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _weight_bytes(model: LoadedModel) -> int:
    """Bytes of parameters and buffers, tied ones once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    return sum(storages.values())


def _tensors(model: LoadedModel) -> Iterator[torch.Tensor]:
    yield from model.module.parameters()
    yield from model.module.buffers()
