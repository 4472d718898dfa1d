"""How much memory this process may still take: the machine's and its control groups' limits. Reads /proc and /sys only."""

from pathlib import Path

_UNLIMITED = 1 << 60


def available_memory_bytes() -> int:
    """The smallest of what the machine has available and what each control group above this process has left."""
    return min([_machine_bytes(), *_cgroup_bytes()])


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _cgroup_bytes() -> list[int]:
    left: list[int] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, used = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            limit_bytes, used_bytes = _number(folder / limit), _number(folder / used)
            if limit_bytes is not None and used_bytes is not None and limit_bytes < _UNLIMITED:
                left.append(max(0, limit_bytes - used_bytes))
            if folder == root:
                break
            folder = folder.parent
    return left


def _number(path: Path) -> int | None:
    """A control group's number; None: no such file, or "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # the path is that of the host's tree; inside a container only its end is there
    return int(text) if text.isdigit() else None
