"""A script, not a module: makes the process that it becomes die with the one that started it, however that one ends.

    python leash.py PARENT_PID PROGRAM ARGUMENT...

Linux sends the signal below when the parent is gone, SIGKILLed or not; the request survives exec. It stands in a script of
its own because code between fork and exec is not safe in a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks for the signal and becomes the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"error: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the request
        sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
