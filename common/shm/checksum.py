"""The checksum of a block's bytes: the same function on both sides of the shared memory."""

import xxhash

CHECKSUM_BYTES = 16


def checksum(data: memoryview | bytes) -> bytes:
    """xxh3-128 of data, 16 bytes big endian. Lets other threads run."""
    return xxhash.xxh3_128_digest(data)


class Checksum:
    """The same of data that comes in pieces."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, piece: memoryview | bytes) -> None:
        """The next bytes. Lets other threads run."""
        self._hash.update(piece)

    def digest(self) -> bytes:
        """Of all pieces so far."""
        return self._hash.digest()
