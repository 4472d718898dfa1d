"""Which neighbouring blocks travel in one copy. Pure: numbers in, numbers out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyRun:
    """One copy.

    Attributes:
        pool_offset: of its first byte in the pool, bytes.
        address: of its first byte in host memory.
        num_bytes: of the copy.
    """

    pool_offset: int
    address: int
    num_bytes: int


def copy_runs(block_ids: Sequence[int], addresses: Sequence[int], block_bytes: int) -> list[CopyRun]:
    """Blocks that follow each other in the pool and in host memory are one run. In the order of the blocks.

    Args:
        block_ids: blocks of the pool.
        addresses: of each one's bytes in host memory.
        block_bytes: of every block.
    """
    runs: list[CopyRun] = []
    first = 0
    for end in range(1, len(block_ids) + 1):
        if end < len(block_ids):
            follows_in_pool = block_ids[end] == block_ids[end - 1] + 1
            if follows_in_pool and addresses[end] == addresses[end - 1] + block_bytes:
                continue
        runs.append(CopyRun(block_ids[first] * block_bytes, addresses[first], (end - first) * block_bytes))
        first = end
    return runs


def cut(run: CopyRun, start: int, piece_bytes: int) -> list[CopyRun]:
    """The run in pieces that cross no boundary of host memory at start + n * piece_bytes.

    Args:
        run: at start or behind it.
        start: address of the first boundary.
        piece_bytes: from one boundary to the next.
    """
    pieces: list[CopyRun] = []
    done = 0
    while done < run.num_bytes:
        address = run.address + done
        left = piece_bytes - (address - start) % piece_bytes
        pieces.append(CopyRun(run.pool_offset + done, address, min(left, run.num_bytes - done)))
        done += pieces[-1].num_bytes
    return pieces
