"""Which processes make a server, and their command lines. Pure: starts nothing, reads nothing of the machine."""

from collections.abc import Mapping, Sequence
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
        store_args, executor_args, scheduler_args: more flags of these services, as they take them themselves.
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
    store_args: tuple[str, ...] = ()
    executor_args: tuple[str, ...] = ()
    scheduler_args: tuple[str, ...] = ()


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
        StartupError: an address is none, or more flags of a service are those that are set here.
    """
    if options.num_executors < 1:
        raise StartupError(f"--executors: must be at least 1, is {options.num_executors}")
    if options.store_args and not options.with_store:
        raise StartupError("--store-args: there is no block store (--no-store)")
    store_address = Address.parse(f"unix:{runtime_folder}/kvstore.sock")
    executors = [Address.parse(f"unix:{runtime_folder}/executor-{index}.sock") for index in range(options.num_executors)]
    public = Address.parse(options.listen or f"unix:{runtime_folder}/scheduler.sock")
    shared = {
        "model": model_folder,
        "model_name": options.model_name or None,
        "kvstore": store_address.target if options.with_store else None,
        "log_level": options.log_level,
    }
    threads = options.threads
    if threads is None and options.num_executors > 1:
        threads = max(1, num_cores // options.num_executors)
    found: list[Service] = []
    if options.with_store:
        own: dict[str, object] = {
            "listen": store_address.target,
            "shm_socket": f"{runtime_folder}/shm.sock",
            "capacity_bytes": options.store_capacity_bytes,
            "disk_dir": options.disk_dir,
            "disk_capacity_bytes": options.disk_capacity_bytes if options.disk_dir is not None else 0,
            "redis_url": None,  # by environment
            "log_level": options.log_level,
        }
        redis = {"OCTAVO_KVSTORE_REDIS_URL": options.redis_url} if options.redis_url else {}
        command = ("-m", "kvstore_svc", *_flags(own), *_more("--store-args", options.store_args, own))
        found.append(Service("kvstore", command, store_address, redis))
    for index, address in enumerate(executors):
        own = {
            "listen": address.target,
            "executor_id": f"executor-{index}",
            **shared,
            "dtype": options.dtype,
            "quantization": options.quantization,
            "load_format": options.load_format,
            "num_blocks": options.kv_blocks,
            "kv_memory_bytes": options.kv_memory_bytes,
            "max_model_len": options.max_model_len,
            "num_threads": threads,
        }
        command = ("-m", "executor_svc", *_flags(own), *_more("--executor-args", options.executor_args, own))
        found.append(Service(f"executor-{index}", command, address))
    own = {
        "listen": public.target,
        **shared,
        "executors": [address.target for address in executors],
        "tls_cert": options.tls_cert,
        "tls_key": options.tls_key,
        "token": None,  # by environment
        "record": options.record,
        "insecure": options.insecure or None,
    }
    command = ("-m", "scheduler_svc", *_flags(own), *_more("--scheduler-args", options.scheduler_args, own))
    secrets = {"OCTAVO_SCHEDULER_TOKEN": options.token} if options.token else {}
    found.append(Service("scheduler", command, public, secrets, is_secure=options.tls_cert is not None))
    return found


def _flags(own: Mapping[str, object]) -> tuple[str, ...]:
    """Settings as flags; None: the service's own default."""
    flags: list[str] = []
    for name, value in own.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            flags += (text for one in values for text in (flag, str(one)))
    return tuple(flags)


def _more(option: str, arguments: Sequence[str], own: Mapping[str, object]) -> Sequence[str]:
    """Flags that a user adds to a service's own; whether there are such, the service says.

    Raises:
        StartupError: one of them is set here, or has an option of its own.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag.removeprefix("--").removeprefix("no-").replace("-", "_") in own:
            raise StartupError(
                f"{option}: {flag} is set by octavo itself; octavo up --help shows the option for it, if there is one"
            )
    return arguments
