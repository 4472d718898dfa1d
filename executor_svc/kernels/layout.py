"""How one layer's keys and values of a block lie in memory, by the name that is part of the KV fingerprint.

Knows shapes. Does not know pools or kernels. In every layout a value is one row; see docs/kv-layout.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One order of the dimensions of keys.

    Attributes:
        version: as Backend.kv_layout_version.
        keys_are_rows: a key is one row, as a value is; otherwise the keys of a block are the columns of a matrix.
    """

    version: str
    keys_are_rows: bool

    def key_shape(self, num_kv_heads: int, head_dim: int, block_size: int) -> tuple[int, int, int]:
        """Shape of a block's keys."""
        return (num_kv_heads, block_size, head_dim) if self.keys_are_rows else (num_kv_heads, head_dim, block_size)

    def value_shape(self, num_kv_heads: int, head_dim: int, block_size: int) -> tuple[int, int, int]:
        """Shape of a block's values."""
        return (num_kv_heads, block_size, head_dim)


KEYS_AS_COLUMNS = KvLayout("k-hds.v-hsd/1", keys_are_rows=False)
KEYS_AS_ROWS = KvLayout("k-hsd.v-hsd/1", keys_are_rows=True)
ROWS_OF_E4M3 = KvLayout("k-hsd.v-hsd.e4m3/1", keys_are_rows=True)
"""Rows of e4m3, and behind them their exponents: kernels/e4m3.py."""
_LAYOUTS = {layout.version: layout for layout in (KEYS_AS_COLUMNS, KEYS_AS_ROWS, ROWS_OF_E4M3)}


def layout_of(version: str) -> KvLayout:
    """The layout of that name."""
    return _LAYOUTS[version]
