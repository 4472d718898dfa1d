"""Child processes alone and together: started, watched, stopped; none is ever left behind."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.rpc.address import Address
from octavo.cli.child import Child
from octavo.cli.services import Service
from octavo.cli.stack import Stack, run_to_end
from octavo.errors import StartupError

FAKE = ("-m", "tests.unit.octavo.cli.fake_service")


def ignore(name: str, line: str) -> None:
    pass


def fake(folder: Path, name: str, behaviour: str = "") -> Service:
    address = Address.parse(f"unix:{folder}/{name}.sock")
    return Service(name, (*FAKE, name, "--listen", address.target, behaviour), address)


@asynccontextmanager
async def stack_of(*services: Service, **options: Any) -> AsyncIterator[tuple[Stack, list[str]]]:
    """A stack that is stopped in the end, and what it said of its progress."""
    progress: list[str] = []
    stack = Stack(services, ignore, progress.append, **options)
    try:
        yield stack, progress
    finally:
        await stack.stop()


def wait_gone(pid: int, timeout_s: float = 20.0) -> bool:
    """Waits until a process that is no child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor) as process:
        return bool(select.select([process], [], [], timeout_s)[0])


async def test_a_childs_lines_come_from_both_streams_and_the_last_of_stdout_is_kept() -> None:
    lines: list[tuple[str, str]] = []
    program = "import sys; print('one'); print('half\\rwhole', file=sys.stderr); print(); print('two', end='')"

    child = await Child.start("c", ["-c", program], lambda name, line: lines.append((name, line)))

    assert await child.exited == 0
    assert sorted(lines) == [("c", ""), ("c", "one"), ("c", "two"), ("c", "whole")]
    assert child.last_stdout_line == "two"


async def test_a_childs_very_long_line_arrives_whole() -> None:
    lines: list[str] = []
    child = await Child.start("c", ["-c", "print('x' * 1_000_000)"], lambda name, line: lines.append(line))

    assert await child.exited == 0
    assert [len(line) for line in lines] == [1_000_000]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("12:00:00.000 scheduler ERROR   cannot start: no room", "no room"),
        ("error: no model", "no model"),
        ("kvstore_svc: /dev/shm is full", "/dev/shm is full"),
        ("ValueError: a bug", "ValueError: a bug"),
    ],
)
async def test_a_childs_last_words_are_its_reason(words: str, reason: str) -> None:
    child = await Child.start("c", ["-c", f"print('before'); raise SystemExit({words!r})"], ignore)

    assert await child.exited == 1
    assert child.last_words() == reason


async def test_a_child_that_ignores_sigterm_is_killed_with_what_it_started() -> None:
    program = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(grandchild.pid, flush=True); grandchild.wait()"
    )
    ready = asyncio.Event()
    child = await Child.start("c", ["-c", program], lambda name, line: ready.set())
    await asyncio.wait_for(ready.wait(), 20)

    assert await child.stop(grace_s=0.05) == -signal.SIGKILL
    assert wait_gone(int(child.last_stdout_line))


def test_children_end_when_their_parent_is_killed() -> None:
    program = (
        "import asyncio; from octavo.cli.child import Child\n"
        "async def main():\n"
        "    child = await Child.start('c', ['-c', 'print(1); import time; time.sleep(600)'], lambda n, l: print(child.pid))\n"
        "    await child.exited\n"
        "asyncio.run(main())"
    )
    parent = subprocess.Popen([sys.executable, "-u", "-c", program], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()

    assert wait_gone(pid)


async def test_a_stack_starts_in_order_and_stops_in_reverse(tmp_path: Path) -> None:
    names = ("kvstore", "executor-0", "scheduler")
    async with stack_of(*(fake(tmp_path, name) for name in names)) as (stack, progress):
        await stack.start()
        assert [line.split(" is ready")[0] for line in progress] == list(names)
        pids = [child.pid for child in stack.children.values()]

    assert progress[3:] == ["scheduler stopped", "executor-0 stopped", "kvstore stopped"]
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_child_that_cannot_start_fails_the_stack_with_its_reason(tmp_path: Path) -> None:
    async with stack_of(fake(tmp_path, "kvstore", "mute"), fake(tmp_path, "scheduler", "refuse")) as (stack, _):
        with pytest.raises(StartupError, match=r"scheduler ended at its start \(exit code 1: no room for scheduler\)"):
            await stack.start()
        pids = [child.pid for child in stack.children.values()]

    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_child_that_never_serves_fails_the_stack(tmp_path: Path) -> None:
    async with stack_of(fake(tmp_path, "kvstore", "mute"), start_timeout_s=1.0) as (stack, _):
        with pytest.raises(StartupError, match="kvstore is not ready after 1 s"):
            await stack.start()


async def test_a_child_that_ends_later_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    services = [fake(tmp_path, "kvstore"), fake(tmp_path, "scheduler")]
    stack = Stack(services, ignore, said.put_nowait, shortest_life_s=0.0)
    try:
        await stack.start()
        watching = asyncio.create_task(stack.watch())
        first, other = stack.children["kvstore"].pid, stack.children["scheduler"].pid
        while not said.empty():
            said.get_nowait()

        os.kill(first, signal.SIGKILL)

        assert "kvstore ended (killed by SIGKILL)" in await asyncio.wait_for(said.get(), 20)
        assert await asyncio.wait_for(said.get(), 20) == "kvstore runs again"
        assert stack.children["kvstore"].pid != first
        assert stack.children["scheduler"].pid == other
        watching.cancel()
    finally:
        await stack.stop()


async def test_a_child_that_ends_soon_after_its_start_is_given_up(tmp_path: Path) -> None:
    async with stack_of(fake(tmp_path, "kvstore"), shortest_life_s=600.0) as (stack, _):
        await stack.start()
        os.kill(stack.children["kvstore"].pid, signal.SIGKILL)

        with pytest.raises(StartupError, match="kvstore ended"):
            await asyncio.wait_for(stack.watch(), 20)


async def test_a_second_signal_kills_what_is_slow_to_stop(tmp_path: Path) -> None:
    is_deaf = asyncio.Event()
    stack = Stack([fake(tmp_path, "kvstore", "deaf")], lambda name, line: is_deaf.set(), lambda line: None, grace_s=600.0)
    starting = asyncio.create_task(stack.start())
    await asyncio.wait_for(is_deaf.wait(), 20)
    child = stack.children["kvstore"]
    stopping = asyncio.create_task(stack.stop())
    await asyncio.sleep(0)

    stopping.cancel()
    await asyncio.wait([stopping])

    assert await asyncio.wait_for(child.exited, 20) < 0
    starting.cancel()
    await asyncio.wait([starting])


async def test_a_process_that_ends_by_itself_gives_its_last_line() -> None:
    assert await run_to_end("p", ["-c", "print('progress'); print('/the/folder')"], ignore) == "/the/folder"
    with pytest.raises(StartupError, match=r"p failed \(exit code 1: it is broken\)"):
        await run_to_end("p", ["-c", "raise SystemExit('error: it is broken')"], ignore)
    with pytest.raises(StartupError, match="printed no result"):
        await run_to_end("p", ["-c", ""], ignore)
