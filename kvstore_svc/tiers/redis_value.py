"""What one block looks like in Redis: its key, and the header in front of its bytes. Knows bytes, no server.

A value says by itself which block it is, so that an answer to another question, or bytes that somebody else left under the
key, are never taken for the block. All integers are little endian, checksums big endian.

| bytes    | type     | field                                    |
|----------|----------|------------------------------------------|
| 0 - 3    | char[4]  | magic `OKVB`                             |
| 4 - 5    | u16      | version of this table, 1                 |
| 6 - 7    | u16      | bytes of the header, 104                 |
| 8 - 15   | u64      | bytes of the block                       |
| 16 - 47  | u8[32]   | fingerprint of the layout                |
| 48 - 79  | u8[32]   | key of the block                         |
| 80 - 95  | u8[16]   | xxh3-128 of the block's bytes            |
| 96 - 103 | u8[8]    | xxh3-64 of the header before it          |
"""

import struct

import xxhash

from common.ids import BlockKey
from kvstore_svc.core.block import Layout
from kvstore_svc.tiers.base import StoredBlock

# The version is part of the name: stores of different versions share a server and never a value.
KEY_PREFIX = b"kv:1:"
_MAGIC = b"OKVB"
_VERSION = 1
_FIELDS = struct.Struct("<4sHHQ32s32s16s")
HEADER_BYTES = _FIELDS.size + 8


def redis_key(key: BlockKey) -> bytes:
    """Name of a block in Redis. The block's key is keyed by the fingerprint of weights, dtype, layout and salt already."""
    return KEY_PREFIX + key.hex().encode()


def pack_header(block: StoredBlock) -> bytes:
    """The HEADER_BYTES bytes in front of a block."""
    layout = block.layout
    fields = _FIELDS.pack(_MAGIC, _VERSION, HEADER_BYTES, layout.block_bytes, layout.fingerprint, block.key, block.checksum)
    return fields + xxhash.xxh3_64_digest(fields)


def unpack_header(header: bytes | memoryview, key: BlockKey) -> StoredBlock | None:
    """What a header says; None: it is damaged, or none of this version, or that of another block."""
    fields = bytes(header[: _FIELDS.size])
    if len(header) < HEADER_BYTES or xxhash.xxh3_64_digest(fields) != header[_FIELDS.size : HEADER_BYTES]:
        return None
    magic, version, header_bytes, block_bytes, fingerprint, found_key, checksum = _FIELDS.unpack(fields)
    if (magic, version, header_bytes, found_key) != (_MAGIC, _VERSION, HEADER_BYTES, key):
        return None
    return StoredBlock(key, Layout(fingerprint, block_bytes), checksum)
