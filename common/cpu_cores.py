"""How many cores this process may keep busy. Knows affinity and the control group's CPU quota."""

import os
from pathlib import Path


def usable_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores by affinity, less where a CPU quota allows less; at least one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup_root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, int(quota) // int(period)))
