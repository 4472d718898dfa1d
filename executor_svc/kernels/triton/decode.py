"""Paged attention of sequences with one query each: reads every cached key and value once, at the memory's speed.

Knows launches and workspaces, and lengths only as numbers on the device, so that a CUDA graph can be replayed with others.
Does not know prefill; decode_kernel.py says how the work is cut.
"""

import torch
import triton
from torch import Tensor

from executor_svc.core.block_address import PAGE_BYTES
from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.configs import Config, lookup, register_defaults
from executor_svc.kernels.triton.decode_kernel import paged_decode_kernel
from executor_svc.kernels.triton.decode_shared import SharedParts
from executor_svc.kernels.triton.e4m3 import is_e4m3
from executor_svc.kernels.triton.overlap import can_overlap
from executor_svc.kernels.triton.scores import check_heads, dot_precision, padded

KERNEL = "paged_decode"
OWN_KERNEL = "paged_decode_own"
"""The same where what sequences share has been read before: each has few keys left."""
KERNEL_OF_E4M3 = "paged_decode_e4m3"
"""As the first over a cache of e4m3: half the bytes, and twice the instructions for each."""
MAX_PROGRAMS_PER_SM = 8

# tile: keys per step; stages: tiles in flight, this one included; programs_per_sm: how many ranges the row is cut into.
register_defaults(
    KERNEL,
    {
        80: {"tile": 64, "num_warps": 4, "stages": 3, "programs_per_sm": 2},
        86: {"tile": 32, "num_warps": 4, "stages": 3, "programs_per_sm": 2},
        90: {"tile": 64, "num_warps": 2, "stages": 3, "programs_per_sm": 2},
        120: {"tile": 32, "num_warps": 4, "stages": 3, "programs_per_sm": 2},
    },
)

register_defaults(
    KERNEL_OF_E4M3,
    {
        89: {"tile": 32, "num_warps": 2, "stages": 3, "programs_per_sm": 4},
        90: {"tile": 64, "num_warps": 2, "stages": 3, "programs_per_sm": 4},
        120: {"tile": 32, "num_warps": 2, "stages": 3, "programs_per_sm": 4},
    },
)

register_defaults(
    OWN_KERNEL,
    {
        80: {"tile": 32, "num_warps": 1, "stages": 4, "programs_per_sm": 4},
        86: {"tile": 32, "num_warps": 1, "stages": 3, "programs_per_sm": 4},
        90: {"tile": 32, "num_warps": 1, "stages": 4, "programs_per_sm": 4},
        120: {"tile": 32, "num_warps": 1, "stages": 3, "programs_per_sm": 4},
    },
)


class DecodeWorkspace:
    """Partial results of ranges, and the counters of who has arrived. One launch at a time may use it.

    Attributes:
        max_num_seqs: the most sequences of a launch.
        max_splits: the most ranges that the row of tiles is cut into.
        num_sms: processors of the device.
    """

    def __init__(self, max_num_seqs: int, num_heads: int, head_dim_v: int, max_splits: int, device: torch.device | str):
        """Allocates max_splits * num_heads * (head_dim_v + 2) * 8 bytes, and the counters."""
        self.max_num_seqs = max_num_seqs
        self.max_splits = max_splits
        # [range, slot, head, ...]: slot 0 for a sequence that began in an earlier range, 1 for one that goes on in a later.
        self.partial_out = torch.zeros(max_splits, 2, num_heads, head_dim_v, dtype=torch.float32, device=device)
        self.partial_sums = torch.zeros(max_splits, 2, num_heads, 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_num_seqs * num_heads, dtype=torch.int32, device=device)
        self.num_sms = num_sms(self.arrived.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(part.numel() * part.element_size() for part in (self.partial_out, self.partial_sums, self.arrived))


def num_sms(device: torch.device) -> int:
    """Processors of a device; 2 for the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def decode_config(query: Tensor, layer_cache: LayerCache, *, shared: bool = False) -> Config:
    """The configuration that paged_decode uses."""
    kernel = OWN_KERNEL if shared else KERNEL_OF_E4M3 if is_e4m3(layer_cache) else KERNEL
    return lookup(
        kernel,
        {
            "head_dim_k": query.shape[2],
            "head_dim_v": layer_cache.value.shape[3],
            "group": query.shape[1] // layer_cache.key.shape[1],
            "dtype": str(query.dtype).removeprefix("torch."),
        },
    )


def paged_decode(
    query: Tensor,
    layer_cache: LayerCache,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    workspace: DecodeWorkspace,
    config: Config | None = None,
    shared: SharedParts | None = None,
    overlap: bool = False,
) -> None:
    """Attention of one query per sequence, in one launch whose shape depends on the arguments' shapes only.

    Args:
        query: [num_seqs, num_heads, head_dim_k]; rows may be strided, the last two dimensions are contiguous.
        layer_cache: key [num_blocks, num_kv_heads, block_size, head_dim_k], value [..., head_dim_v]; strided over dimension 0.
        block_tables: int32 [num_seqs, max_blocks]; rows may be strided. Entries beyond a length are never read.
            Or int64, of the same shape: where each block lies, whatever memory that is (core/block_address.py); not with shared.
        seq_lens: int32 [num_seqs]; the query's own position is seq_lens - 1. 0: a padding row, out becomes zero.
        out: [num_seqs, num_heads, head_dim_v]; rows may be strided.
        scale: scores are multiplied by it.
        window: a key is visible if its position > the query's - window; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: they do not.
        sinks: [num_heads], the score of an extra column of each head that has no value; None: none.
        workspace: for at least num_seqs sequences and these heads.
        config: None: the tuned one.
        shared: what attend_shared has queued right before, with the same query and scale and the same block_tables; None: all
            keys of every sequence are read here. Not together with window.
        overlap: begin before the kernel in front has ended, see overlap.py. What writes block_tables and seq_lens must then
            have ended before the kernel in front began. Off, because programs that are placed between those of another
            kernel are no longer spread evenly, which costs more than the early start gains.

    Raises:
        ValueError: shapes that do not fit together, more sequences than the workspace is for, or shared parts with a window or
            with addresses.
    """
    check_heads(query, layer_cache)
    num_seqs, num_heads, head_dim_k = query.shape
    _, num_kv_heads, block_size, head_dim_v = layer_cache.value.shape
    if num_seqs == 0:
        return
    if num_seqs > workspace.max_num_seqs or workspace.partial_out.shape[2:] != (num_heads, head_dim_v):
        raise ValueError(f"the workspace is not for {num_seqs} sequences, {num_heads} heads and values of {head_dim_v}")
    if shared is not None and window is not None:
        raise ValueError(f"keys that are shared are visible to all, which a window of {window} denies")
    if shared is not None and block_tables.dtype == torch.int64:
        raise ValueError("shared parts are read by block ids, block_tables has addresses")
    overlap = overlap or (shared is not None and shared.overlap)
    group = num_heads // num_kv_heads
    few_rows = triton.next_power_of_2(group)
    config = config or decode_config(query, layer_cache, shared=shared is not None)
    # Elements of 4 bytes take twice the memory per tile.
    tile = config["tile"] if query.element_size() == 2 else max(16, config["tile"] // 2)
    in_registers = min(4096, 1024 * config["num_warps"]) if shared is not None else 4096
    num_ranges = max(1, min(workspace.max_splits, workspace.num_sms * config["programs_per_sm"] // num_kv_heads))
    paged_decode_kernel[(num_ranges * num_kv_heads,)](
        query,
        layer_cache.key,
        layer_cache.value,
        block_tables,
        seq_lens,
        out,
        sinks if sinks is not None else query,
        workspace.partial_out,
        workspace.partial_sums,
        workspace.arrived,
        seq_lens if shared is None else shared.own_starts,
        workspace.arrived if shared is None else shared.workspace.places,
        workspace.partial_out if shared is None else shared.workspace.part_out,
        workspace.partial_sums if shared is None else shared.workspace.part_sums,
        num_seqs,
        num_ranges,
        scale,
        softcap if softcap is not None else 1.0,
        window if window is not None else 0,
        query.stride(0),
        _entry_elements(layer_cache.key, block_tables),
        _entry_elements(layer_cache.value, block_tables),
        block_tables.stride(0),
        out.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=padded(group),
        FEW_ROWS=few_rows,
        AT_ONCE=max(1, in_registers // (few_rows * padded(head_dim_v))),  # parts that are added up in one go
        HEAD_DIM_K=head_dim_k,
        PADDED_K=padded(head_dim_k),
        HEAD_DIM_V=head_dim_v,
        PADDED_V=padded(head_dim_v),
        BLOCK_SIZE=block_size,
        TILE=tile,
        MAX_SEQS=_seqs_bucket(num_seqs),
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        SHARED=shared is not None,
        SHARED_ROWS=0 if shared is None else shared.rows,
        STAGES=config["stages"],
        PRECISION=dot_precision(query),
        FP8=is_e4m3(layer_cache),
        OVERLAP=overlap,
        LETS_NEXT=can_overlap(query.device),
        num_warps=config["num_warps"],
        **({"launch_pdl": True} if overlap else {}),
    )


def _entry_elements(cache: Tensor, block_tables: Tensor) -> int:
    """What an entry of the tables counts, in elements: blocks of the cache, or pages."""
    return PAGE_BYTES // cache.element_size() if block_tables.dtype == torch.int64 else cache.stride(0)


def _seqs_bucket(num_seqs: int) -> int:
    """Upper bound of num_seqs from a short list, so that few variants are compiled; one sequence needs no search."""
    limits = (1, 16, 128, 512)
    return next((limit for limit in limits if num_seqs <= limit), int(triton.next_power_of_2(num_seqs)))
