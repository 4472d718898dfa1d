"""Holds Dockerfile and docker-compose.yml against the code, without a container engine: python -m scripts.check_containers.

Every path, port, command, user, environment variable, address, volume and health check in them is checked. Prints one line a
problem; the exit status says whether there was one.
"""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from common.errors import StartupError
from common.rpc.address import Address
from common.settings import ServiceSettings, load_settings
from executor_svc.settings import ExecutorSettings
from kvstore_svc.settings import KvStoreSettings
from octavo.executor.v1 import executor_service_pb2
from octavo.kvstore.v1 import kv_store_service_pb2
from octavo.scheduler.v1 import inference_service_pb2
from scheduler_svc.settings import SchedulerSettings
from scripts.compose import Compose, Service, num_bytes
from scripts.dockerfile import Dockerfile, Image

ROOT = Path(__file__).resolve().parent.parent
USER = "10001:10001"
# Environment variables that are not ours: of the interpreter, the C library, numba, the NVIDIA container runtime.
FOREIGN_PREFIXES = ("PATH", "PYTHON", "MALLOC_", "NUMBA_", "TRITON_", "NVIDIA_")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "1073741824", "MALLOC_TOP_PAD_": "67108864"}
PROFILES = {"cpu", "gpu", "redis"}


@dataclass(frozen=True)
class Program:
    """One of our services, as the code has it."""

    package: str
    settings_class: type[ServiceSettings]
    grpc_service: str

    @property
    def env_prefix(self) -> str:
        """What its environment variables begin with."""
        return str(self.settings_class.model_config["env_prefix"])


SCHEDULER = Program(
    "scheduler_svc", SchedulerSettings, inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
)
EXECUTOR = Program(
    "executor_svc", ExecutorSettings, executor_service_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name
)
KVSTORE = Program("kvstore_svc", KvStoreSettings, kv_store_service_pb2.DESCRIPTOR.services_by_name["KvStoreService"].full_name)
TARGETS = {"scheduler": SCHEDULER, "executor-cpu": EXECUTOR, "executor-gpu": EXECUTOR, "kvstore": KVSTORE}


@dataclass(frozen=True)
class Container:
    """A compose service that runs one of our images.

    Attributes:
        command: entry point and command together.
        settings: what its program would read; None: it runs something else, or its settings are wrong.
    """

    service: Service
    program: Program
    image: Image
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    settings: ServiceSettings | None = None

    @property
    def runs_program(self) -> bool:
        """Whether it runs the service of its image, not another command."""
        return self.command[:3] == ["python", "-m", self.program.package]


def problems(files: Path) -> list[str]:
    """What is wrong with Dockerfile, docker-compose.yml, .env and .dockerignore of a folder."""
    dockerfile = Dockerfile.read(files / "Dockerfile")
    missing = [f"Dockerfile: no target {target}" for target in TARGETS if target not in dockerfile.stages]
    if missing:
        return missing
    ignored = (files / ".dockerignore").read_text().splitlines()
    found: list[str] = []
    for target, program in TARGETS.items():
        found += [f"Dockerfile, {target}: {problem}" for problem in image_problems(dockerfile.image(target), program, ignored)]
    compose = Compose.read(files)
    containers: dict[str, Container] = {}
    for service in compose.services.values():
        if service.target is not None and service.target not in TARGETS:
            found.append(f"compose, {service.name}: the Dockerfile has no target {service.target}")
        elif service.target is not None:
            program = TARGETS[service.target]
            containers[service.name] = container_of(service, program, dockerfile.image(service.target))
    for service in compose.services.values():
        found += [f"compose, {service.name}: {problem}" for problem in service_problems(service, compose)]
    for name, container in containers.items():
        found += [f"compose, {name}: {problem}" for problem in container_problems(container, containers, compose)]
    return found


def container_of(service: Service, program: Program, image: Image) -> Container:
    """Image and compose entry put together."""
    entrypoint = service.raw.get("entrypoint", image.entrypoint) or []
    command = [*entrypoint, *map(str, service.raw.get("command", image.command) or [])]
    env = image.env | service.env
    container = Container(service, program, image, command, env)
    try:
        settings = read_settings(program, env, command[3:]) if container.runs_program else None
    except (StartupError, ValidationError):
        settings = None  # settings_problems says what is wrong
    return Container(service, program, image, command, env, settings)


# --- settings ---


def read_settings(program: Program, env: dict[str, str], flags: list[str]) -> ServiceSettings:
    """The settings that the program would read.

    Raises:
        StartupError, ValidationError: a value or a flag is wrong.
    """
    names = {name: name.removeprefix(program.env_prefix).lower() for name in env if name.startswith(program.env_prefix)}
    values: dict[str, Any] = {key: _decoded(env[name]) for name, key in names.items()}
    given = load_settings(program.settings_class, flags)
    values |= {name: getattr(given, name) for name in given.model_fields_set}
    return program.settings_class(**values)


def settings_problems(program: Program, env: dict[str, str], flags: list[str]) -> Iterator[str]:
    """Variables that nothing reads, and values out of range."""
    for name in env:
        if name.startswith(program.env_prefix):
            if name.removeprefix(program.env_prefix).lower() not in program.settings_class.model_fields:
                yield f"{name}: {program.package} has no such setting"
        elif not name.startswith(FOREIGN_PREFIXES):
            yield f"{name}: {program.package} does not read it"
    try:
        settings = read_settings(program, env, flags)
        Address.parse(str(getattr(settings, "listen", "")))
    except StartupError as error:
        yield error.message
    except ValidationError as error:
        yield from (f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors())


def _decoded(value: str) -> object:
    """Lists come as JSON, everything else as it is."""
    return json.loads(value) if value.startswith(("[", "{")) else value


# --- images ---


def image_problems(image: Image, program: Program, ignored: list[str]) -> Iterator[str]:
    """What is wrong with the image of one target."""
    if image.user != USER:
        yield f"USER is {image.user or 'root'}, not {USER}"
    yield from (f"{name} is not {value}" for name, value in MALLOC.items() if image.env.get(name) != value)
    if image.entrypoint is None:
        yield "ENTRYPOINT is not in exec form: signals would not arrive"
    elif image.entrypoint != ["python", "-m", program.package]:
        yield f"ENTRYPOINT is not python -m {program.package}"
    yield from command_problems(image.entrypoint or [])
    yield from settings_problems(program, image.env, [])
    has_torch = any("[executor]" in run for run in image.runs)
    if has_torch != (program is EXECUTOR):
        yield "has PyTorch and does not need it" if has_torch else "lacks the extra executor"
    for source in image.sources:
        if not (ROOT / source).exists():
            yield f"COPY {source}: no such path"
        elif f"!{source}" not in ignored:
            yield f"COPY {source}: .dockerignore leaves it out"
    listen = _listen(program, image.env)
    expected_ports = {int(listen.target.rpartition(":")[2])} if listen and listen.socket_path is None else set()
    if image.ports != expected_ports:
        yield f"EXPOSE {sorted(image.ports)}: listens on {sorted(expected_ports)}"
    yield from health_problems(image.healthcheck, program, listen)


def health_problems(command: list[str] | None, program: Program, listen: Address | None) -> Iterator[str]:
    """What is wrong with a health check."""
    if command is None:
        yield "no HEALTHCHECK in exec form"
        return
    if command[:3] != ["python", "-m", "common.rpc.probe"] or len(command) != 5:
        yield f"HEALTHCHECK {' '.join(command)}: not python -m common.rpc.probe ADDRESS SERVICE"
        return
    yield from command_problems(command)
    if listen is not None and command[3] != listen.target.replace("0.0.0.0:", "127.0.0.1:"):
        yield f"HEALTHCHECK asks {command[3]}, the service listens on {listen.target}"
    if command[4] != program.grpc_service:
        yield f"HEALTHCHECK asks for {command[4]}, the service is {program.grpc_service}"


def command_problems(command: list[str]) -> Iterator[str]:
    """Modules that are not there, and flags that they do not know."""
    if command[:2] != ["python", "-m"]:
        return
    path = ROOT / command[2].replace(".", "/")
    if not (path / "__main__.py").exists() and not path.with_suffix(".py").exists():
        yield f"python -m {command[2]}: no such module"
        return
    flags = [word for word in command[3:] if word.startswith("--")]
    if flags and path.with_suffix(".py").exists():
        known = _flags_of(command[2])
        yield from (f"python -m {command[2]}: no flag {flag}" for flag in flags if flag not in known)


@functools.cache
def _flags_of(module: str) -> frozenset[str]:
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
    return frozenset(re.findall(r"--[a-z][a-z-]*", done.stdout))


def _listen(program: Program, env: dict[str, str]) -> Address | None:
    try:
        return Address.parse(str(getattr(read_settings(program, env, []), "listen", "")))
    except (StartupError, ValidationError):
        return None


# --- compose ---


def service_problems(service: Service, compose: Compose) -> Iterator[str]:
    """What is wrong with any service, ours or not."""
    yield from (f"profile {profile} is not one of {sorted(PROFILES)}" for profile in service.profiles if profile not in PROFILES)
    yield from (f"volume {volume} is not declared" for volume in service.mounts.values() if volume not in compose.volumes)
    yield from (f"network {name} is not declared" for name in service.raw.get("networks", []) if name not in compose.networks)
    for name, condition in service.dependencies.items():
        other = compose.services.get(name)
        if other is None:
            yield f"depends on {name}, which is not there"
        elif other.profiles and not set(service.profiles) <= set(other.profiles):
            yield f"depends on {name}, which another profile has"
        elif (condition == "service_completed_successfully") != (other.raw.get("restart") == "no"):
            yield f"waits for {name} with {condition}, which does not fit its restart policy"
    if service.raw.get("restart") not in ("no", "unless-stopped"):
        yield "no restart policy"
    if service.target is None and "healthcheck" not in service.raw:
        yield "no healthcheck"


def container_problems(container: Container, containers: dict[str, Container], compose: Compose) -> Iterator[str]:
    """What is wrong with a service that runs one of our images."""
    yield from command_problems(container.command)
    if str(container.service.raw.get("user", USER)) != USER:
        yield f"user is {container.service.raw['user']}, not {USER}"
    yield from port_problems(container)
    yield from (f"{path} is in no volume" for path in _paths(container) if container.service.mounted(path) is None)
    if container.runs_program:
        yield from settings_problems(container.program, container.env, container.command[3:])
        if "healthcheck" in container.service.raw:
            test = container.service.raw["healthcheck"]["test"]
            yield from health_problems(test[1:], container.program, _listen(container.program, container.env))
        yield from address_problems(container, containers, compose)
    if container.program is EXECUTOR and container.runs_program:
        if container.service.raw.get("ulimits", {}).get("memlock") != -1:
            yield "ulimits: memlock is not -1: pinned memory needs it"
        if container.service.target == "executor-gpu" and "nvidia" not in json.dumps(container.service.raw.get("deploy", {})):
            yield "reserves no NVIDIA device"
    if container.program is KVSTORE:
        yield from redis_problems(container, compose)
        yield from store_problems(container, compose)


def port_problems(container: Container) -> Iterator[str]:
    """Only the public port is published, on the loopback address."""
    listen = getattr(container.settings, "listen", "")
    for port in container.service.raw.get("ports", []):
        host, _, inside = str(port).rpartition(":")
        if container.program is not SCHEDULER or not listen.endswith(f":{inside}"):
            yield f"publishes {port}, which is not the public port"
        elif not host.startswith("127.0.0.1:"):
            yield f"publishes {port} beyond the loopback address"
    if container.program is SCHEDULER and not container.service.raw.get("ports"):
        yield "publishes no port"


def address_problems(container: Container, containers: dict[str, Container], compose: Compose) -> Iterator[str]:
    """Addresses of other services are where these listen, and unix sockets lie in a volume that both have."""
    for address in getattr(container.settings, "executors", []):
        host, _, port = str(address).rpartition(":")
        peer = containers.get(host.removeprefix(f"{compose.project}-").rpartition("-")[0])
        if peer is None or peer.program is not EXECUTOR:
            yield f"executors: {address}: no such executor"
        elif not str(getattr(peer.settings, "listen", "")).endswith(f":{port}"):
            yield f"executors: {address}: {peer.service.name} listens on {getattr(peer.settings, 'listen', '?')}"
    kvstore = str(getattr(container.settings, "kvstore", ""))
    if kvstore:
        store = next(peer for peer in containers.values() if peer.program is KVSTORE)
        if kvstore != getattr(store.settings, "listen", ""):
            yield f"kvstore: {kvstore}: the store listens on {getattr(store.settings, 'listen', '?')}"
        elif (path := Address.parse(kvstore).socket_path) and container.service.mounted(str(path)) != store.service.mounted(
            str(path)
        ):
            yield f"kvstore: {kvstore} is not in the volume of the store"


def redis_problems(container: Container, compose: Compose) -> Iterator[str]:
    """The store's Redis, if it has one, is a service of this file."""
    if container.runs_program and "OCTAVO_KVSTORE_REDIS_URL" not in container.service.env:
        yield "does not read OCTAVO_REDIS_URL: the profile redis is of no use"
    url = container.settings.redis_url.get_secret_value() if isinstance(container.settings, KvStoreSettings) else ""
    host = urlsplit(url).hostname
    if host is not None and "redis" not in (compose.services[host].profiles if host in compose.services else ()):
        yield f"redis_url: {host} is no service of the profile redis"


def store_problems(container: Container, compose: Compose) -> Iterator[str]:
    """The store's shared memory fits its limit, and its sockets lie in memory, for the services' user alone."""
    limit_bytes = num_bytes(container.service.raw.get("mem_limit", 0))
    slab_bytes = container.settings.capacity_bytes if isinstance(container.settings, KvStoreSettings) else 0
    if limit_bytes < slab_bytes + (1 << 30):
        yield f"mem_limit {limit_bytes} does not cover {slab_bytes} bytes of slabs and 1 GiB for the process"
    disk_dir = container.settings.disk_dir if isinstance(container.settings, KvStoreSettings) else ""
    if not disk_dir.startswith("/"):
        yield "disk_dir names no folder in a volume"
    for path in _paths(container):
        options = compose.volumes.get(container.service.mounted(path) or "", {}).get("driver_opts", {})
        if path == disk_dir:
            if options.get("type") == "tmpfs":
                yield f"the volume of {path} is in memory"
            continue
        wanted = {"mode=0750", "uid=10001", "gid=10001"}
        if options.get("type") != "tmpfs" or not wanted <= set(str(options.get("o", "")).split(",")):
            yield f"the volume of {path} is no tmpfs with {','.join(sorted(wanted))}"


def _paths(container: Container) -> list[str]:
    """Paths of the container that its settings or its command name: sockets, folders, models."""
    values = [value for _, value in container.settings] if container.settings is not None else container.command
    texts = [str(value) for value in values if isinstance(value, str | Path)]
    paths = [text.removeprefix("unix:") for text in texts]
    return [path for path in paths if path.startswith("/")]


def main() -> int:
    """Checks the repository's own files."""
    found = problems(ROOT)
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
