"""How long a thread keeps Python's interpreter to itself while others want it. Knows nothing else."""

import sys

SWITCH_INTERVAL_S = 2e-4


def switch_often() -> None:
    """For processes whose threads copy, hash or write beside a thread that answers: by default each may keep it for 5 ms."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
