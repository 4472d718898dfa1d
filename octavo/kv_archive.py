"""A file of KV blocks that describes itself: what `octavo kv export` writes and `import` reads. Knows bytes, not stores.

    "OCTKVARC", format      then for each block: a header of 112 bytes, the bytes;      then the end: a header with the count

Every header has its own checksum and says the length and the checksum of the bytes behind it; the end says how many blocks
there are, so that a file that was cut off is known to be one.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import xxhash

from common.errors import InvalidParameter

_START = struct.Struct("<8sII")
_START_MAGIC = b"OCTKVARC"
_FORMAT = 1
_HEADER = struct.Struct("<4sIQ32s32s16s")
_SUM_BYTES = 16
_BLOCK, _END = b"BLCK", b"END."
_MAX_BLOCK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ArchivedBlock:
    """One block.

    Attributes:
        key: 32 bytes.
        fingerprint: of its layout, 32 bytes.
        checksum: xxh3-128 of data.
    """

    key: bytes
    fingerprint: bytes
    checksum: bytes
    data: bytes


class ArchiveWriter:
    """Writes blocks one after the other.

    Args:
        file: open for writing.
    """

    def __init__(self, file: BinaryIO):
        self.num_blocks = 0
        self._file = file
        file.write(_START.pack(_START_MAGIC, _FORMAT, 0))

    def add(self, block: ArchivedBlock) -> None:
        """One more block."""
        self._file.write(_header(_BLOCK, len(block.data), block.key, block.fingerprint, block.checksum))
        self._file.write(block.data)
        self.num_blocks += 1

    def finish(self) -> None:
        """The end; without it the file counts as cut off."""
        self._file.write(_header(_END, self.num_blocks, bytes(32), bytes(32), bytes(16)))


def read_archive(file: BinaryIO, name: str) -> Iterator[ArchivedBlock]:
    """The blocks of a file; their checksums are compared by whoever takes them.

    Args:
        file: open for reading.
        name: of the file, for errors.

    Raises:
        InvalidParameter: it is no such file, of a newer format, damaged or cut off; blocks before that have been given.
    """
    start = file.read(_START.size)
    if len(start) < _START.size or not start.startswith(_START_MAGIC):
        raise InvalidParameter(name, "is no file of blocks; octavo kv export writes them")
    version = _START.unpack(start)[1]
    if version > _FORMAT:
        raise InvalidParameter(name, f"was written by a newer version (format {version}, this one knows {_FORMAT})")
    num_blocks = 0
    while True:
        header = file.read(_HEADER.size + _SUM_BYTES)
        fields, its_sum = header[: _HEADER.size], header[_HEADER.size :]
        if len(its_sum) < _SUM_BYTES:
            raise InvalidParameter(name, f"is cut off after {num_blocks} blocks")
        magic, _, length, key, fingerprint, checksum = _HEADER.unpack(fields)
        if xxhash.xxh3_128_digest(fields) != its_sum or (magic == _BLOCK and length > _MAX_BLOCK_BYTES):
            raise InvalidParameter(name, f"is damaged after {num_blocks} blocks")
        if magic == _END:
            if length != num_blocks:
                raise InvalidParameter(name, f"has {num_blocks} blocks and should have {length}")
            return
        data = file.read(length)
        if len(data) < length:
            raise InvalidParameter(name, f"is cut off after {num_blocks} blocks")
        num_blocks += 1
        yield ArchivedBlock(key, fingerprint, checksum, data)


def _header(magic: bytes, number: int, key: bytes, fingerprint: bytes, checksum: bytes) -> bytes:
    fields = _HEADER.pack(magic, 0, number, key, fingerprint, checksum)
    return fields + xxhash.xxh3_128_digest(fields)
