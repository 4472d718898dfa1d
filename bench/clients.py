"""Client processes that share one workload. Knows how to start them and to put their answers together; takes no time itself."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.client import Answer
from bench.workloads import Turns, WorkItem

_LEAD_S = 0.05
_GRACE_S = 20.0


class RunError(Exception):
    """A workload did not come to its end; says why."""


@dataclass(frozen=True)
class Run:
    """One run of a workload as its clients saw it.

    Attributes:
        answers: in order of the workload's items.
        client_cpu: share of a core that the busiest client process took; None: there was no client.
    """

    answers: tuple[Answer, ...]
    client_cpu: float | None = None

    @property
    def total_s(self) -> float:
        """From the start to the last token."""
        return max(answer.last_s for answer in self.answers)

    @property
    def num_output_tokens(self) -> int:
        """Of all answers."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def first_token_s(self) -> list[float]:
        """Time to first token of every request, from its sending."""
        return [answer.first_s - answer.sent_s for answer in self.answers]

    @property
    def per_token_s(self) -> list[float]:
        """Time per output token after the first, of every request that has more than one."""
        return [(a.last_s - a.first_s) / (a.num_tokens - 1) for a in self.answers if a.num_tokens > 1]


class Clients:
    """Running client processes."""

    def __init__(self, num_processes: int):
        self._num_processes = num_processes
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, target: str, items: Sequence[WorkItem], timeout_s: float) -> Run:
        """Sends every item at its time, each on a stream of its own.

        Args:
            target: of the public API.
            items: dealt out to the processes in turn.
            timeout_s: for the whole run.

        Raises:
            RunError: a request failed or took too long; the message is the first one's.
        """
        parts = [items[i :: self._num_processes] for i in range(self._num_processes)]
        commands = [
            {"items": [(item.prompt_token_ids, item.num_output_tokens, item.arrival_s) for item in part]}
            for part in parts
            if part
        ]
        run = self._carry_out(target, commands, timeout_s)
        # What was dealt out in turn is collected in turn.
        answers: list[Answer | None] = [None] * len(items)
        at = 0
        for i, part in enumerate(parts):
            answers[i :: self._num_processes] = run.answers[at : at + len(part)]
            at += len(part)
        return Run(tuple(answer for answer in answers if answer is not None), run.client_cpu)

    def run_turns(self, target: str, turns: Turns, timeout_s: float) -> Run:
        """All conversations from one process; the answers of the first turn come first.

        Raises:
            RunError: see run.
        """
        command = {
            "conversations": [conversation.new_token_ids for conversation in turns.conversations],
            "num_in_flight": turns.num_in_flight,
            "num_output_tokens": turns.num_output_tokens,
        }
        return self._carry_out(target, [command], timeout_s)

    def _carry_out(self, target: str, commands: Sequence[dict[str, Any]], timeout_s: float) -> Run:
        """One command per process, all begun at the same time; answers in order of commands."""
        self._start()
        users = self._processes[: len(commands)]
        with ThreadPoolExecutor(len(users)) as pool:
            for process, command in zip(users, commands, strict=True):
                _send(process, {"target": target, "timeout_s": timeout_s, **command})
            self._receive(pool, users, timeout_s)
            start_at_s = time.monotonic() + _LEAD_S
            for process in users:
                _send(process, {"start_at_s": start_at_s})
            replies = self._receive(pool, users, timeout_s)
        answers = tuple(Answer(**answer) for reply in replies for answer in reply["answers"])
        if errors := [answer.error for answer in answers if answer.error]:
            raise RunError(f"{len(errors)} of {len(answers)} requests failed, the first: {errors[0]}")
        run = Run(answers)
        return Run(answers, max(reply["cpu_s"] for reply in replies) / max(run.total_s, 1e-9))

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes = []

    def _start(self) -> None:
        while len(self._processes) < self._num_processes:
            command = [sys.executable, "-m", "bench.client"]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def _receive(
        self, pool: ThreadPoolExecutor, processes: Sequence["subprocess.Popen[str]"], timeout_s: float
    ) -> list[dict[str, Any]]:
        """One reply of each process; all are ended if one says nothing."""
        futures = [pool.submit(_readline, process) for process in processes]
        deadline = time.monotonic() + timeout_s + _GRACE_S
        try:
            return [json.loads(future.result(max(0.0, deadline - time.monotonic()))) for future in futures]
        except (TimeoutError, ValueError) as error:
            self.stop()  # which ends the reads, too
            raise RunError(f"a client process did not answer within {timeout_s:.0f} s or ended: {error!r}") from error


def _send(process: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _readline(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@contextmanager
def running_clients(num_processes: int) -> Iterator[Clients]:
    """Client processes for the length of a with block."""
    clients = Clients(num_processes)
    try:
        yield clients
    finally:
        clients.stop()
