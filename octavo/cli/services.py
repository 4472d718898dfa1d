"""Which processes make a server, and their command lines. Pure: starts nothing, reads nothing of the machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import StartupError
from common.rpc.address import Address

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class StackOptions:
    """What `octavo up` was asked for. None: the service's own default.

    Attributes:
        model: name, folder, .gguf file or hub id, as given; the services get the prepared folder.
        listen: address of the public API; None: a unix socket in the runtime folder.
        kv_blocks, kv_memory_bytes: device pool of each executor.
        store_capacity_bytes: of the block store.
        disk_dir: folder of the block store's disk tier; None: no disk tier.
        disk_capacity_bytes: room that it may take.
        redis_url: of a Redis or Valkey server below the block store; empty: none.
        threads: compute threads of each executor.
        token: bearer token of the public API.
        record: folder for the scheduler's recordings; None: none.
    """

    model: str = DEFAULT_MODEL
    model_name: str = ""
    listen: str | None = None
    num_executors: int = 1
    dtype: str | None = None
    quantization: str | None = None
    load_format: str | None = None
    kv_blocks: int | None = None
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    with_store: bool = True
    store_capacity_bytes: int | None = None
    disk_dir: Path | None = None
    disk_capacity_bytes: int | None = None
    redis_url: str = field(default="", repr=False)
    threads: int | None = None
    token: str = field(default="", repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    record: Path | None = None
    log_level: str = "INFO"


@dataclass(frozen=True)
class Service:
    """One process.

    Attributes:
        arguments: of the Python interpreter.
        address: where its health can be asked.
        environment: what must not be read on a command line.
        is_secure: it speaks TLS, so that only its port can be tried.
    """

    name: str
    arguments: tuple[str, ...]
    address: Address
    environment: Mapping[str, str] = field(default_factory=dict)
    is_secure: bool = False


def services(options: StackOptions, model_folder: Path, runtime_folder: Path, num_cores: int) -> list[Service]:
    """The processes in the order of their start: block store, executors, scheduler.

    Args:
        options: what was asked for.
        model_folder: prepared model.
        runtime_folder: private folder for unix sockets.
        num_cores: cores that this process may use; executors share them when there are several.

    Raises:
        StartupError: an address is none.
    """
    if options.num_executors < 1:
        raise StartupError(f"--executors: must be at least 1, is {options.num_executors}")
    store_address = Address.parse(f"unix:{runtime_folder}/kvstore.sock")
    stored = ("--kvstore", store_address.target) if options.with_store else ()
    named = _flags(model_name=options.model_name or None)
    level = ("--log-level", options.log_level)
    found: list[Service] = []
    arguments: tuple[str, ...]
    if options.with_store:
        arguments = ("--listen", store_address.target, "--shm-socket", f"{runtime_folder}/shm.sock")
        capacity = _flags(
            capacity_bytes=options.store_capacity_bytes,
            disk_dir=options.disk_dir,
            disk_capacity_bytes=options.disk_capacity_bytes if options.disk_dir is not None else 0,
        )
        redis = {"OCTAVO_KVSTORE_REDIS_URL": options.redis_url} if options.redis_url else {}
        found.append(Service("kvstore", ("-m", "kvstore_svc", *arguments, *capacity, *level), store_address, redis))

    threads = options.threads
    if threads is None and options.num_executors > 1:
        threads = max(1, num_cores // options.num_executors)
    tuned = _flags(
        dtype=options.dtype,
        quantization=options.quantization,
        load_format=options.load_format,
        num_blocks=options.kv_blocks,
        kv_memory_bytes=options.kv_memory_bytes,
        max_model_len=options.max_model_len,
        num_threads=threads,
    )
    executors = [Address.parse(f"unix:{runtime_folder}/executor-{index}.sock") for index in range(options.num_executors)]
    for index, address in enumerate(executors):
        arguments = ("--listen", address.target, "--executor-id", f"executor-{index}", "--model", str(model_folder))
        command = ("-m", "executor_svc", *arguments, *named, *stored, *tuned, *level)
        found.append(Service(f"executor-{index}", command, address))

    public = Address.parse(options.listen or f"unix:{runtime_folder}/scheduler.sock")
    command = ("-m", "scheduler_svc", "--listen", public.target, "--model", str(model_folder), *named, *stored, *level)
    command += tuple(flag for address in executors for flag in ("--executors", address.target))
    command += _flags(tls_cert=options.tls_cert, tls_key=options.tls_key, record=options.record) + (
        ("--insecure",) if options.insecure else ()
    )
    secrets = {"OCTAVO_SCHEDULER_TOKEN": options.token} if options.token else {}
    found.append(Service("scheduler", command, public, secrets, is_secure=options.tls_cert is not None))
    return found


def _flags(**values: object) -> tuple[str, ...]:
    return tuple(
        text for name, value in values.items() if value is not None for text in (f"--{name.replace('_', '-')}", str(value))
    )
