"""The test's hold on a client process."""

import signal
import subprocess
import sys
from collections.abc import Sequence

from tests.integration.kvstore_svc.store_process import TIMEOUT_S, StoreProcess


class Victim:
    """Runs client_process in a phase, up to the point where it says that it is ready.

    Args:
        store: of which it is a client.
        phase: see client_process.
        prefix: a command to run it with.
    """

    def __init__(self, store: StoreProcess, phase: str, prefix: Sequence[str] = ()):
        command = [*prefix, sys.executable, "-m", "tests.integration.kvstore_svc.client_process", store.address.target, phase]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.hear() == "ready"

    def hear(self) -> str:
        """The next line that it says."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go_on(self) -> None:
        """Lets it take the next step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Ends it for good."""
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
