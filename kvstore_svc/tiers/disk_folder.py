"""The disk tier's folder: one store at a time, of a format that this version knows, and how much room it may take.

Knows paths. Does not know segments' contents, the index or blocks.
"""

import errno
import fcntl
import logging
import os
from pathlib import Path

from common.errors import StartupError
from kvstore_svc.core.disk_record import DISK_FORMAT
from kvstore_svc.tiers.disk_index import sync_folder
from kvstore_svc.tiers.disk_segment import find_segments

log = logging.getLogger(__name__)
_FORMAT_LINE = "octavo block store, disk format "
DEFAULT_CAPACITY_BYTES = 64 << 30
_SHARE_OF_FREE = 0.5


class DiskUnavailable(Exception):  # noqa: N818 -- says what is, as in common/errors.py
    """The folder cannot be used now; the store goes on without. Never leaves kvstore_svc/tiers."""


class DiskFolder:
    """A folder that is ours until close.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Path, owner: str):
        """Creates the folder if need be, and takes it.

        Args:
            path: of the folder.
            owner: written into the lock file, for people and for octavo kv: where the store listens.

        Raises:
            StartupError: another store has it, or it was written by a newer version.
            DiskUnavailable: it cannot be created or written.
        """
        try:
            self.path = path = path.expanduser()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            raise DiskUnavailable(f"{path}: {reason}") from error
        try:
            self._take(owner)
        except BaseException:
            os.close(self._lock)
            raise

    def _take(self, owner: str) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(self._lock, 4096, 0).decode(errors="replace").strip()
            raise StartupError(
                f"--disk-dir {self.path}: another block store uses it ({other}); give this one a folder of its own"
            ) from None
        try:
            self._check_format()
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{owner}\n".encode(), 0)
            if not (self.path / "format").exists():
                new = self.path / "format.new"
                new.write_text(f"{_FORMAT_LINE}{DISK_FORMAT}\n")
                new.rename(self.path / "format")
                sync_folder(self.path)
        except OSError as error:
            raise DiskUnavailable(f"{self.path}: {reason_of(error)}") from error

    def _check_format(self) -> None:
        path = self.path / "format"
        if not path.exists():
            return
        line = path.read_text(errors="replace").strip()
        number = line.removeprefix(_FORMAT_LINE)
        if not line.startswith(_FORMAT_LINE) or not number.isdigit():
            raise StartupError(f'--disk-dir {self.path}: its file "format" says {line[:80]!r}; it is no folder of a block store')
        if int(number) > DISK_FORMAT:
            raise StartupError(
                f"--disk-dir {self.path}: written by a newer version (disk format {number}, this one knows {DISK_FORMAT});"
                " start that version, or give this one another folder"
            )

    def default_capacity_bytes(self) -> int:
        """64 GiB, or half of what is free or ours already if that is less; never less than is ours already.

        Raises:
            OSError: the folder cannot be read.
        """
        ours = sum(path.stat().st_size for path, _, _ in find_segments(self.path))
        stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize
        capacity_bytes = default_capacity(free, ours)
        if capacity_bytes == ours > 0:
            log.warning(
                "disk tier %s: its %d bytes of blocks are more than its share of the disk, of which %d bytes are free; it keeps"
                " them, and does not grow; --disk-capacity-bytes makes it smaller",
                self.path, ours, free,
            )  # fmt: skip
        return capacity_bytes

    def close(self) -> None:
        """Gives the folder back."""
        os.close(self._lock)


def default_capacity(free_bytes: int, own_bytes: int) -> int:
    """What the tier may take of a disk, if nobody says it. What it has it keeps.

    Args:
        free_bytes: on the disk.
        own_bytes: of the tier's segments.
    """
    return max(own_bytes, min(DEFAULT_CAPACITY_BYTES, int((free_bytes + own_bytes) * _SHARE_OF_FREE)))


def reason_of(error: OSError) -> str:
    """For people."""
    if error.errno == errno.ENOSPC:
        return "no space left"
    return error.strerror or str(error)
