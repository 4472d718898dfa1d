"""Start-up: from settings to a runner that has run. Knows every part of the executor and the order in which they are made."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from common.block_hash import kv_fingerprint
from common.cpu_cores import usable_cores
from common.degraded import DegradedPaths
from common.errors import StartupError
from common.model_spec import folder_name, public_name
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity
from executor_svc.clients.kvstore import BlockStoreClient
from executor_svc.device import Device, Phases, Pool
from executor_svc.kernels.e4m3 import dtype_name
from executor_svc.model.load import LoadedModel, load_model
from executor_svc.runner import StepRunner
from executor_svc.settings import ExecutorSettings
from executor_svc.transfer import BlockMemory, BlockStore
from octavo.executor.v1 import executor_service_pb2 as pb

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 2.0
KV_LAYOUT_VERSION = "block-major/1"


@dataclass(frozen=True)
class Engine:
    """An executor without a wire.

    Attributes:
        blocks: the pool as transfers see it.
        store: None without a block store.
        info: what GetExecutorInfo answers.
    """

    runner: StepRunner
    pool: Pool
    blocks: BlockMemory
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
    phases = Phases(phases_before or {})
    torch.set_num_threads(settings.num_threads or usable_cores())
    device = choose_device(settings)
    backend = device.backend
    progress(f"loading {folder}")
    with phases.timed("load"):
        model = load_model(
            folder,
            dtype=settings.dtype,
            quantization=settings.quantization,
            load_format=settings.load_format,
            seed=settings.seed,
            backend=backend,
            max_model_len=settings.max_model_len or None,
            device=device.torch_device,
            rewrites=device.rewrites,
        )
    started = device.start(model, phases, progress)
    pool, limits = started.pool, started.limits
    fingerprint = kv_fingerprint(
        {
            **model.fingerprint_parts,
            "block_size": str(pool.block_size),
            "layout": f"{KV_LAYOUT_VERSION} {pool.layout.version} {pool.block_bytes}",
            **({} if settings.kv_stored_form == "native" else {"stored_form": f"{settings.kv_stored_form}/1"}),
        }
    )
    store = _connect_store(settings, fingerprint, started.blocks)
    transport, reason = store.transport if store is not None else ("", "no block store is configured")
    info = pb.ExecutorInfo(
        executor_id=settings.executor_id,
        model=public_name(settings.model_name or folder_name(folder)),
        backend=backend.name,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=dtype_name(pool.dtype),
        kv_stored_form=settings.kv_stored_form,
        stored_block_bytes=started.blocks.block_bytes,
        kv_fingerprint=fingerprint,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        block_bytes=pool.block_bytes,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        memory_bytes={"weights": _weight_bytes(model), **started.memory_bytes},
        kv_transport=transport,
        kv_transport_reason=reason,
        startup_phases=[pb.Phase(name=name, seconds=seconds) for name, seconds in phases.seconds(model.phases)],
    )
    progress(
        f"ready: {info.dtype} on {info.backend}, {started.description}, {pool.num_blocks} blocks of "
        f"{pool.block_size} tokens in {info.kv_dtype} ({pool.num_bytes >> 20} MiB); "
        + ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in info.startup_phases)
    )
    return Engine(started.runner, pool, started.blocks, store, info)


def choose_device(settings: ExecutorSettings) -> Device:
    """The device that the settings name, or the best one there is.

    Raises:
        StartupError: it is not there, or cannot do what the settings ask for.
    """
    wants_gpu = settings.device == "cuda" or (settings.device == "auto" and settings.backend in ("auto", "triton"))
    if wants_gpu and torch.cuda.is_available():
        from executor_svc.cuda.device import CudaDevice

        return CudaDevice(settings)
    if settings.device == "cuda":
        raise StartupError("device: cuda is asked for, and PyTorch finds no NVIDIA GPU here")
    from executor_svc.cpu_device import CpuDevice

    return CpuDevice(settings)


def _connect_store(settings: ExecutorSettings, fingerprint: bytes, blocks: BlockMemory) -> BlockStore | None:
    if not settings.kvstore:
        return None
    store = BlockStoreClient(
        Address.parse(settings.kvstore),
        client_id=settings.executor_id,
        layout_fingerprint=fingerprint,
        block_bytes=blocks.block_bytes,
        transport=settings.kv_transport,
        degraded=DegradedPaths(),
        security=ChannelSecurity(tls_ca=settings.kvstore_tls_ca, token=settings.kvstore_token.get_secret_value()),
        slab_user=blocks,
    )
    store.connect(CONNECT_TIMEOUT_S)
    return store


def _weight_bytes(model: LoadedModel) -> int:
    """Bytes of parameters and buffers, tied ones once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    return sum(storages.values())


def _tensors(model: LoadedModel) -> Iterator[torch.Tensor]:
    yield from model.module.parameters()
    yield from model.module.buffers()
