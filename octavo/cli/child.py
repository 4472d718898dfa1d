"""One child process: its output line by line, its end, and how it is stopped. Knows no service."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_LEASH = Path(__file__).with_name("leash.py")
_TAIL_LINES = 40

# How services say why they end: "cannot start: ..." in a log line, "error: ..." or "kvstore_svc: ..." on a line of its own.
_REASON = re.compile(r"(?:cannot start: |^error: |^\w+_svc: )(.*)")

LineSink = Callable[[str, str], None]
"""Called with the name of the process and one line of its output."""


class Child:
    """A running Python process that dies with this one.

    Attributes:
        name: for people.
        tail: the last lines of its output.
        last_stdout_line: of standard output alone; "" before the first.
        exited: done when the process is gone and its output has been read; the result is its exit code, negative for a signal.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, on_line: LineSink):
        self.name = name
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.last_stdout_line = ""
        self._process = process
        self._on_line = on_line
        self.exited = asyncio.ensure_future(self._run())

    @classmethod
    async def start(
        cls, name: str, arguments: Sequence[str], on_line: LineSink, *, environment: Mapping[str, str] | None = None
    ) -> "Child":
        """Starts this interpreter with arguments, for example ["-m", "kvstore_svc"].

        The child is in a session of its own, so that Ctrl-C reaches this process alone, which then stops its children in order.
        Call it from the main thread: the kernel ties the child to the thread that started it.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_LEASH), str(os.getpid()), sys.executable, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        return cls(name, process, on_line)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then after grace_s SIGKILL for it and whatever it started.

        Returns:
            The exit code.
        """
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await asyncio.wait([self.exited], timeout=grace_s)
        self.kill()
        return await asyncio.shield(self.exited)

    def kill(self) -> None:
        """SIGKILL for the process and whatever it started and left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def ending(self) -> str:
        """How it ended, for people: "killed by SIGKILL", or its exit code and last words."""
        code = self.exited.result()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}: {self.last_words()}"

    def last_words(self) -> str:
        """The reason that it gave, or else its last line."""
        words = [line for line in self.tail if line.strip()]
        reasons = [match[1] for match in map(_REASON.search, words) if match is not None]
        return (reasons or words or ["it said nothing"])[-1]

    async def _run(self) -> int:
        assert self._process.stdout is not None and self._process.stderr is not None
        readers = [
            asyncio.create_task(self._read(self._process.stdout, is_stdout=True)),
            asyncio.create_task(self._read(self._process.stderr, is_stdout=False)),
        ]
        code = await self._process.wait()
        # A grandchild may keep the pipes open for longer; what is not read by then is not waited for.
        _, late = await asyncio.wait(readers, timeout=1.0)
        for reader in late:
            reader.cancel()
        return code

    async def _read(self, stream: asyncio.StreamReader, *, is_stdout: bool) -> None:
        rest = b""
        while data := await stream.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line, is_stdout)
        if rest:
            self._take(rest, is_stdout)

    def _take(self, raw: bytes, is_stdout: bool) -> None:
        line = raw.decode(errors="replace").rstrip().rpartition("\r")[2]  # of a progress bar, what it showed last
        self.tail.append(line)
        if is_stdout and line:
            self.last_stdout_line = line
        self._on_line(self.name, line)
