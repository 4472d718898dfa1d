"""Which running kernel this is. Processes whose host ids differ cannot share memory; equal ids are no proof that they can."""

from pathlib import Path


def host_id() -> str:
    """Identity of the kernel's boot; containers of one machine have the same."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
