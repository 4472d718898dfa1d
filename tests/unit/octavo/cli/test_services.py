"""Command lines of the processes."""

from pathlib import Path

import pytest

from common.settings import ServiceSettings, load_settings
from executor_svc.settings import ExecutorSettings
from kvstore_svc.settings import KvStoreSettings
from octavo.cli.services import Service, StackOptions, services
from octavo.errors import StartupError
from scheduler_svc.settings import SchedulerSettings

MODEL = Path("/models/m")
RUNTIME = Path("/run/octavo")


def read(service: Service) -> ServiceSettings:
    """What the service itself understands of its command line."""
    kinds: dict[str, type[ServiceSettings]] = {
        "kvstore_svc": KvStoreSettings,
        "executor_svc": ExecutorSettings,
        "scheduler_svc": SchedulerSettings,
    }
    return load_settings(kinds[service.arguments[1]], service.arguments[2:])


def test_by_default_store_executor_and_scheduler_meet_on_unix_sockets() -> None:
    store, executor, scheduler = map(read, services(StackOptions(listen="127.0.0.1:50051"), MODEL, RUNTIME, 4))

    assert isinstance(store, KvStoreSettings)
    assert isinstance(executor, ExecutorSettings)
    assert isinstance(scheduler, SchedulerSettings)
    assert store.listen == executor.kvstore == scheduler.kvstore == "unix:/run/octavo/kvstore.sock"
    assert scheduler.executors == [executor.listen] == ["unix:/run/octavo/executor-0.sock"]
    assert scheduler.listen == "127.0.0.1:50051"
    assert executor.model == str(MODEL)
    assert scheduler.model == MODEL
    assert executor.num_threads == ExecutorSettings.model_fields["num_threads"].default


def test_every_option_reaches_its_service() -> None:
    options = StackOptions(
        model_name="models/mine",
        num_executors=2,
        dtype="bfloat16",
        quantization="int8",
        load_format="random",
        kv_blocks=7,
        kv_memory_bytes=1 << 20,
        max_model_len=99,
        store_capacity_bytes=1 << 28,
        threads=3,
        token="secret",
        tls_cert=Path("/c"),
        tls_key=Path("/k"),
        insecure=True,
        log_level="DEBUG",
    )
    found = services(options, MODEL, RUNTIME, 4)
    store, first, second, scheduler = map(read, found)

    assert isinstance(store, KvStoreSettings)
    assert isinstance(first, ExecutorSettings)
    assert isinstance(second, ExecutorSettings)
    assert isinstance(scheduler, SchedulerSettings)
    assert [service.name for service in found] == ["kvstore", "executor-0", "executor-1", "scheduler"]
    assert (first.dtype, first.quantization, first.load_format, first.num_blocks) == ("bfloat16", "int8", "random", 7)
    assert (first.kv_memory_bytes, first.max_model_len, first.num_threads) == (1 << 20, 99, 3)
    assert (first.executor_id, second.executor_id) == ("executor-0", "executor-1")
    assert first.model_name == second.model_name == scheduler.model_name == "models/mine"
    assert store.capacity_bytes == 1 << 28
    assert (scheduler.tls_cert, scheduler.tls_key, scheduler.insecure) == (Path("/c"), Path("/k"), True)
    assert {settings.log_level for settings in (store, first, scheduler)} == {"DEBUG"}
    assert scheduler.listen == "unix:/run/octavo/scheduler.sock"
    assert found[-1].is_secure


def test_the_token_is_on_no_command_line() -> None:
    scheduler = services(StackOptions(token="secret"), MODEL, RUNTIME, 4)[-1]

    assert "secret" not in " ".join(scheduler.arguments)
    assert scheduler.environment == {"OCTAVO_SCHEDULER_TOKEN": "secret"}


def test_the_redis_url_may_hold_a_password_and_is_on_no_command_line() -> None:
    store = services(StackOptions(redis_url="redis://:secret@cache"), MODEL, RUNTIME, 4)[0]

    assert "secret" not in " ".join(store.arguments)
    assert store.environment == {"OCTAVO_KVSTORE_REDIS_URL": "redis://:secret@cache"}


def test_without_a_store_nobody_looks_for_one() -> None:
    executor, scheduler = map(read, services(StackOptions(with_store=False), MODEL, RUNTIME, 4))

    assert isinstance(executor, ExecutorSettings)
    assert isinstance(scheduler, SchedulerSettings)
    assert executor.kvstore == scheduler.kvstore == ""


@pytest.mark.parametrize(("num_cores", "threads"), [(8, 2), (2, 1), (1, 1)])
def test_several_executors_share_the_cores(num_cores: int, threads: int) -> None:
    executor = read(services(StackOptions(num_executors=4), MODEL, RUNTIME, num_cores)[1])

    assert isinstance(executor, ExecutorSettings)
    assert executor.num_threads == threads


def test_a_server_without_executors_is_refused() -> None:
    with pytest.raises(StartupError, match="--executors"):
        services(StackOptions(num_executors=0), MODEL, RUNTIME, 4)


def test_more_flags_of_a_service_reach_it_as_they_are() -> None:
    options = StackOptions(
        num_executors=2,
        executor_args=("--kv-dtype", "fp8_e4m3", "--no-cuda-graphs"),
        store_args=("--redis-ttl-s=60",),
        scheduler_args=("--policy", "fcfs"),
    )
    store, first, second, scheduler = map(read, services(options, MODEL, RUNTIME, 4))

    assert isinstance(store, KvStoreSettings)
    assert isinstance(first, ExecutorSettings)
    assert isinstance(second, ExecutorSettings)
    assert isinstance(scheduler, SchedulerSettings)
    assert (first.kv_dtype, first.cuda_graphs, second.kv_dtype) == ("fp8_e4m3", False, "fp8_e4m3")
    assert store.redis_ttl_s == 60
    assert scheduler.policy == "fcfs"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (StackOptions(executor_args=("--listen", "unix:/x")), "--executor-args: --listen is set by octavo itself"),
        (StackOptions(executor_args=("--dtype=float32",)), "--executor-args: --dtype is set"),
        (StackOptions(store_args=("--redis-url", "redis://x")), "--store-args: --redis-url is set"),
        (StackOptions(scheduler_args=("--no-insecure",)), "--scheduler-args: --no-insecure is set"),
        (StackOptions(with_store=False, store_args=("--throttle", "disk=1")), "--store-args: there is no block store"),
    ],
)
def test_flags_that_are_set_here_are_refused_by_name(options: StackOptions, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        services(options, MODEL, RUNTIME, 4)
