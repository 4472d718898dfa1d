"""Paged decode attention by itself: how much of the memory's speed it reaches, on the pool as a served Llama-8B has it.

    python -m bench.attention_gpu        a JSON line per batch and pool, bfloat16 and e4m3: TB/s, the share of what a plain copy
                                         reaches, microseconds of a layer

One CUDA graph holds the attention of all layers, so that every layer's keys and values come from memory and not from a cache.
Bytes are those of keys and values, read once. Knows kernels and a pool's layout; knows no model and no request.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor_svc.kernels.e4m3 import E4M3, dtype_name, row_bytes
from executor_svc.kvcache.pool import block_bytes, layer_views

BATCHES = ((64, 8192), (256, 1024), (32, 1024), (16, 4096), (1, 32768))
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 32, 8, 128, 16
_COPY_BYTES = 8 << 30
_REPLAYS = 10


@dataclass(frozen=True)
class _KvShape:
    """As kvcache.pool wants a layer."""

    num_kv_heads: int = NUM_KV_HEADS
    head_dim_k: int = HEAD_DIM
    head_dim_v: int = HEAD_DIM


def median_s(run: Callable[[], object], repeats: int = _REPLAYS) -> float:
    """Seconds of one run on the device."""
    run()
    seconds: list[float] = []
    for _ in range(repeats):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written ones."""
    source = torch.empty(_COPY_BYTES // 2, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_s(lambda: target.copy_(source))


def attention_s(num_seqs: int, seq_len: int, storage: Tensor) -> float:
    """Seconds of all layers.

    Args:
        num_seqs: with one query each.
        seq_len: of every sequence.
        storage: of the pool's dtype, flat, holds the pool.
    """
    from executor_svc.kernels.layout import KEYS_AS_ROWS
    from executor_svc.kernels.triton.decode import MAX_PROGRAMS_PER_SM, DecodeWorkspace, num_sms, paged_decode

    blocks_per_seq = -(-seq_len // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq
    caches = layer_views(storage, [_KvShape()] * NUM_LAYERS, num_blocks, BLOCK_SIZE, KEYS_AS_ROWS)
    tables = torch.randperm(num_blocks, device="cuda").view(num_seqs, blocks_per_seq).int()
    seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device="cuda")
    query = torch.randn(num_seqs, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(query)
    max_splits = num_sms(query.device) * MAX_PROGRAMS_PER_SM
    workspace = DecodeWorkspace(num_seqs, NUM_HEADS, HEAD_DIM, max_splits, query.device)

    def all_layers() -> None:
        for cache in caches:
            paged_decode(
                query, cache, tables, seq_lens, out,
                scale=HEAD_DIM**-0.5, window=None, softcap=None, sinks=None, workspace=workspace,
            )  # fmt: skip

    all_layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_layers()
    return median_s(graph.replay)


def pools() -> Iterator[tuple[str, Tensor]]:
    """Names and storages of pools for the largest batch, one at a time."""
    num_blocks = max(num_seqs * seq_len for num_seqs, seq_len in BATCHES) // BLOCK_SIZE
    for dtype in (torch.bfloat16, E4M3):
        if dtype == E4M3 and torch.cuda.get_device_capability() < (8, 9):
            continue
        num_bytes = num_blocks * block_bytes([_KvShape()] * NUM_LAYERS, BLOCK_SIZE, dtype)
        # Bytes of which no element is NaN or infinite in either dtype, and no exponent is large.
        yield dtype_name(dtype), torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_(0x30, 0x40).view(dtype)


def main() -> int:
    """Measures every batch; one that fails is said, and the next one follows."""
    if not torch.cuda.is_available():
        print("bench.attention_gpu measures an NVIDIA GPU, and torch finds none on this machine", file=sys.stderr)
        return 1
    copied = copy_bandwidth()
    _report("copy", "bandwidth", copied / 1e12, "TB/s")
    for pool, storage in pools():
        for num_seqs, seq_len in BATCHES:
            name = f"attention {num_seqs} x {seq_len}" + (f" {pool}" if storage.dtype == E4M3 else "")
            try:
                seconds = attention_s(num_seqs, seq_len, storage)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            num_rows = NUM_LAYERS * num_seqs * seq_len * 2 * NUM_KV_HEADS
            reached = num_rows * row_bytes(HEAD_DIM, storage.dtype) / seconds
            _report(name, "bandwidth", reached / 1e12, "TB/s")
            _report(name, "share of copy", reached / copied, "x")
            _report(name, "time of a layer", seconds / NUM_LAYERS * 1e6, "us")
        del storage
    return 0


def _report(workload: str, figure: str, value: float, unit: str) -> None:
    print(json.dumps({"workload": workload, "figure": figure, "value": value, "unit": unit}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
