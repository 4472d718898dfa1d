"""Where a block lies, whatever memory that is: one number for a device's pool, for a slab that the device reaches, for a peer.

With unified addressing a device reads all of them by 64-bit addresses of one kind, so a kernel that finds blocks by address needs
no second kind of table. An entry is the distance from the pool's first block in pages, because a kernel that knows that addresses
are multiples of a page reads 16 bytes at a time. Pure: addresses in, numbers out.
"""

from collections.abc import Sequence

PAGE_BYTES = 4096
"""What every block's address and size are multiples of."""
_LIMIT = 1 << 47


def page_entries(addresses: Sequence[int], pool_address: int) -> list[int]:
    """Block table entries of blocks at these addresses.

    Args:
        addresses: of each block's first byte, as the device sees it.
        pool_address: of the pool's block 0, as the device sees it.

    Raises:
        ValueError: an address that no entry can say.
    """
    entries = []
    for address in addresses:
        distance = address - pool_address
        if distance % PAGE_BYTES or not -_LIMIT <= distance // PAGE_BYTES < _LIMIT:
            raise ValueError(
                f"a block at {address:#x} with a pool at {pool_address:#x}: not a whole number of {PAGE_BYTES} bytes"
            )
        entries.append(distance // PAGE_BYTES)
    return entries
