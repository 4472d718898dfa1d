"""The index file: a log of records, so that a start need not look into segments. Knows a file; believes nothing of it.

Appended to behind the blocks that it speaks of, rewritten when it has become long. See docs/decisions/.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from kvstore_svc.core.disk_record import RECORD_BYTES, DiskRecord, IndexContent, read_index

NAME = "index"
_SPARE_RECORDS = 4096


class IndexFile:
    """See the module's first lines. Confined to one thread at a time.

    Args:
        folder: of the disk tier.
    """

    def __init__(self, folder: Path):
        self._path = folder / NAME
        self._fd: int | None = None
        self._num_records = 0

    def read(self) -> IndexContent:
        """What the file says; nothing if there is none.

        Raises:
            OSError: it cannot be read.
        """
        return read_index(self._path.read_bytes() if self._path.exists() else b"")

    def is_long(self, num_blocks: int) -> bool:
        """Whether a rewrite with num_blocks records would shorten it by half, or it has to be written anew anyhow."""
        return self._fd is None or self._num_records > 2 * num_blocks + _SPARE_RECORDS

    def append(self, records: Iterable[DiskRecord]) -> None:
        """Returns when the records would survive a loss of power.

        Raises:
            OSError: they may not; the next call is to be rewrite.
        """
        data = b"".join(record.pack() for record in records)
        assert self._fd is not None, "rewrite comes first"
        try:
            _write_all(self._fd, data)
            os.fdatasync(self._fd)
        except OSError:
            self.close()
            raise
        self._num_records += len(data) // RECORD_BYTES

    def rewrite(self, records: Iterable[DiskRecord]) -> None:
        """Replaces the file by one with these records, at once or not at all, and syncs it.

        Raises:
            OSError: the old one is still there.
        """
        self.close()
        data = b"".join(record.pack() for record in records)
        new = self._path.with_suffix(".new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, data)
            os.fsync(fd)
            new.rename(self._path)
            sync_folder(self._path.parent)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        self._num_records = len(data) // RECORD_BYTES

    def close(self) -> None:
        """Closes the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder would survive a loss of power.

    Raises:
        OSError: they may not.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
