"""Attention of decodes to the keys that they share with others, read once per group. Knows launches and workspaces.

What comes out are parts that paged_decode adds to those of each sequence's own keys. Launches depend on shapes only; groups are
numbers on the device.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from executor_svc.core.prefix_groups import MAX_GROUPS, SHARED_MULTIPLE
from executor_svc.kernels.batch import LayerCache, SharedPrefixes
from executor_svc.kernels.triton.configs import Config, lookup, register_defaults
from executor_svc.kernels.triton.decode_shared_kernel import shared_prefix_kernel
from executor_svc.kernels.triton.e4m3 import is_e4m3
from executor_svc.kernels.triton.overlap import can_overlap
from executor_svc.kernels.triton.scores import check_heads, dot_precision, padded

KERNEL = "shared_prefix"
MAX_ROWS = 128
MAX_RANGES_PER_SM = 2

# rows: queries of an item, all heads of a KV head counted; tile: keys per step, divides SHARED_MULTIPLE; programs_per_sm: how
# many ranges the row is cut into; overlap: whether the kernel of the own keys begins before this one has ended.
register_defaults(
    KERNEL,
    {
        80: {"rows": 64, "tile": 64, "num_warps": 4, "stages": 2, "programs_per_sm": 1, "overlap": 0},
        86: {"rows": 64, "tile": 32, "num_warps": 4, "stages": 2, "programs_per_sm": 1, "overlap": 0},
        90: {"rows": 64, "tile": 128, "num_warps": 4, "stages": 3, "programs_per_sm": 1, "overlap": 0},
        120: {"rows": 64, "tile": 32, "num_warps": 4, "stages": 2, "programs_per_sm": 1, "overlap": 0},
    },
)


class SharedWorkspace:
    """Parts of items. One launch at a time may use it, and paged_decode after it.

    Attributes:
        max_num_seqs: the most decodes of a launch.
        max_ranges: the most ranges that the row of tiles is cut into.
        num_sms: processors of the device.
        part_out: float32, flat: [slot, KV head, row, head_dim_v].
        part_sums: float32, flat: [slot, KV head, row, 2], the largest score and the sum of weights.
        places: int32 [max_num_seqs, 3]: of each sequence in a group, its first slot, how many, and the row of its first head.
    """

    def __init__(
        self,
        max_num_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim_v: int,
        num_sms: int,
        device: torch.device | str,
        *,
        max_rows: int = MAX_ROWS,
        max_groups: int = MAX_GROUPS,
    ):
        """Allocates for items of up to max_rows rows, or one sequence's if that is more, and max_groups groups."""
        few_rows = triton.next_power_of_2(num_heads // num_kv_heads)
        max_rows = max(max_rows, few_rows)
        self.max_num_seqs = max_num_seqs
        self.max_ranges = max(1, num_sms * MAX_RANGES_PER_SM // num_kv_heads)
        self.num_sms = num_sms
        # Items of all groups: full ones, and one of each group that is not.
        rows = num_kv_heads * ((self.max_ranges + max_groups) * max_rows + max_num_seqs * few_rows)
        self.part_out = torch.zeros(rows * head_dim_v, dtype=torch.float32, device=device)
        self.part_sums = torch.zeros(rows * 2, dtype=torch.float32, device=device)
        self.places = torch.zeros(max_num_seqs, 3, dtype=torch.int32, device=device)
        self._heads = (num_heads, num_kv_heads, head_dim_v)
        self._max_rows, self._max_groups = max_rows, max_groups

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(part.numel() * part.element_size() for part in (self.part_out, self.part_sums, self.places))

    def check(self, num_seqs: int, heads: tuple[int, int, int], rows: int, num_groups: int) -> None:
        """Raises ValueError when a launch does not fit."""
        fits = num_seqs <= self.max_num_seqs and rows <= self._max_rows and num_groups <= self._max_groups
        if not fits or heads != self._heads:
            raise ValueError(
                f"the workspace is not for {num_seqs} sequences, {num_groups} groups, items of {rows} rows, and query heads, KV "
                f"heads and values of {heads}"
            )


@dataclass(frozen=True)
class SharedParts:
    """What attend_shared has queued, for paged_decode.

    Attributes:
        own_starts: int32 [num_seqs], see SharedPrefixes.
        workspace: where the parts are.
        rows: rows of a slot's KV head.
        overlap: whether paged_decode may begin before they are there.
    """

    own_starts: Tensor
    workspace: SharedWorkspace
    rows: int
    overlap: bool


def attend_shared(
    query: Tensor,
    layer_cache: LayerCache,
    block_tables: Tensor,
    shared: SharedPrefixes,
    *,
    scale: float,
    softcap: float | None,
    workspace: SharedWorkspace,
    config: Config | None = None,
) -> SharedParts:
    """Attention of each group's queries to what the group shares, in one launch whose shape depends on shapes only.

    Args:
        query: [num_seqs, num_heads, head_dim_k], as in paged_decode, also the other arguments.
        layer_cache: see there.
        block_tables: see there; of a group, that of its first member is read.
        shared: the groups. All keys of a group are visible to all of its members: layers with a window have no use for it.
        scale: positive.
        softcap: see there.
        workspace: for at least num_seqs sequences and these heads.
        config: None: the tuned one.

    Raises:
        ValueError: shapes that do not fit together, or do not fit the workspace.
    """
    check_heads(query, layer_cache)
    num_seqs, num_heads, head_dim_k = query.shape
    _, num_kv_heads, block_size, head_dim_v = layer_cache.value.shape
    group = num_heads // num_kv_heads
    few_rows = triton.next_power_of_2(group)
    num_groups = shared.group_lens.shape[0]
    config = config or lookup(
        KERNEL,
        {
            "head_dim_k": head_dim_k,
            "head_dim_v": head_dim_v,
            "group": group,
            "dtype": str(query.dtype).removeprefix("torch."),
        },
    )
    rows, tile = _fitting(config, query, head_dim_k)
    seqs_per_item = max(1, rows // few_rows)
    workspace.check(num_seqs, (num_heads, num_kv_heads, head_dim_v), seqs_per_item * few_rows, num_groups)
    num_ranges = max(1, min(workspace.max_ranges, workspace.num_sms * config["programs_per_sm"] // num_kv_heads))
    overlap = bool(config["overlap"]) and can_overlap(query.device)
    shared_prefix_kernel[(num_ranges * num_kv_heads,)](
        query,
        layer_cache.key,
        layer_cache.value,
        block_tables,
        shared.group_lens,
        shared.group_ends,
        shared.members,
        workspace.places,
        workspace.part_out,
        workspace.part_sums,
        num_ranges,
        scale,
        softcap if softcap is not None else 1.0,
        query.stride(0),
        layer_cache.key.stride(0),
        layer_cache.value.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        FEW_ROWS=few_rows,
        SEQS=seqs_per_item,
        HEAD_DIM_K=head_dim_k,
        PADDED_K=padded(head_dim_k),
        HEAD_DIM_V=head_dim_v,
        PADDED_V=padded(head_dim_v),
        BLOCK_SIZE=block_size,
        TILE=tile,
        MAX_GROUPS=num_groups,
        SOFTCAP=softcap is not None,
        STAGES=config["stages"],
        PRECISION=dot_precision(query),
        FP8=is_e4m3(layer_cache),
        LETS_NEXT=can_overlap(query.device),
        num_warps=config["num_warps"],
    )
    return SharedParts(shared.own_starts, workspace, seqs_per_item * few_rows, overlap)


def _fitting(config: Config, query: Tensor, head_dim: int) -> tuple[int, int]:
    """Rows and tile that take no more memory than the configuration is meant for: that of 128 dimensions of 2 bytes."""
    rows, tile = config["rows"], min(config["tile"], SHARED_MULTIPLE)
    size = padded(head_dim) * query.element_size()
    while size > 256:
        rows, tile, size = max(16, rows // 2), max(16, tile // 2), size // 2
    return rows, tile
