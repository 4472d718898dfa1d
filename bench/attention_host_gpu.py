"""Decode attention over blocks that lie in the host's memory: read in place at every step, or copied to the device first.

    python -m bench.attention_host_gpu      a JSON line per length and share of blocks in host memory

One sequence of Llama-8B's shape. `break_even_steps`: reading in place is cheaper for a context that serves so many steps at most.
Knows kernels, a pool's layout and registered memory; knows no model and no request.
"""

import json
import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.attention_gpu import BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_LAYERS, _KvShape, median_s

LENGTHS = (2048, 16_000, 65_536)
SHARES = (1.0, 0.5, 0.125)
_PIECE_BYTES = 64 << 20


class HostBlocks:
    """Registered memory of some blocks, as a store's slab is.

    Attributes:
        memory: uint8 [num_blocks, block_bytes].
        addresses: of each block, as the device sees it.
    """

    def __init__(self, num_blocks: int, block_bytes: int):
        from executor_svc.cuda.registrar import CudaRegistrar

        self._mapping = mmap.mmap(-1, num_blocks * block_bytes)
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8).view(num_blocks, block_bytes)
        self.memory.fill_(0)
        self._registrar = CudaRegistrar(torch.device("cuda", torch.cuda.current_device()))
        start, size = self.memory.data_ptr(), num_blocks * block_bytes
        self._pieces = range(start, start + size, _PIECE_BYTES)
        for piece in self._pieces:
            self._registrar.register(piece, min(_PIECE_BYTES, start + size - piece))
        self.addresses = [self._registrar.device_address(start + n * block_bytes) for n in range(num_blocks)]

    def close(self) -> None:
        """Lets go of the memory."""
        torch.cuda.synchronize()
        for piece in self._pieces:
            self._registrar.unregister(piece)


def graph_of(work: Callable[[], None]) -> Callable[[], None]:
    """The work as one launch."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def measure(seq_len: int, shares: tuple[float, ...]) -> None:
    """All ways for one length."""
    from executor_svc.core.block_address import page_entries
    from executor_svc.kernels.layout import KEYS_AS_ROWS
    from executor_svc.kernels.triton.decode import MAX_PROGRAMS_PER_SM, DecodeWorkspace, num_sms, paged_decode
    from executor_svc.kvcache.pool import block_bytes, layer_views

    layers = [_KvShape()] * NUM_LAYERS
    num_blocks = -(-seq_len // BLOCK_SIZE)
    size = block_bytes(layers, BLOCK_SIZE, torch.bfloat16)
    storage = torch.empty(num_blocks * size // 2, dtype=torch.bfloat16, device="cuda").normal_()
    caches = layer_views(storage, layers, num_blocks, BLOCK_SIZE, KEYS_AS_ROWS)
    pool = storage.view(torch.uint8).view(num_blocks, size)
    host = HostBlocks(num_blocks, size)
    host.memory.copy_(pool)
    torch.cuda.synchronize()
    query = torch.randn(1, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    seq_lens = torch.full((1,), seq_len, dtype=torch.int32, device="cuda")
    workspace = DecodeWorkspace(1, NUM_HEADS, HEAD_DIM, num_sms(query.device) * MAX_PROGRAMS_PER_SM, query.device)

    def attention(tables: Tensor, out: Tensor) -> Callable[[], None]:
        def all_layers() -> None:
            for layer, cache in enumerate(caches):
                paged_decode(
                    query, cache, tables, seq_lens, out[layer],
                    scale=HEAD_DIM**-0.5, window=None, softcap=None, sinks=None, workspace=workspace,
                )  # fmt: skip

        return graph_of(all_layers)

    def outputs() -> Tensor:
        return torch.full((NUM_LAYERS, 1, NUM_HEADS, HEAD_DIM), torch.nan, dtype=torch.bfloat16, device="cuda")

    by_id, by_address = outputs(), outputs()
    ids = torch.arange(num_blocks, dtype=torch.int32, device="cuda")[None]
    device_s = median_s(attention(ids, by_id))
    on_device = [pool[n].data_ptr() for n in range(num_blocks)]
    entries = torch.tensor([page_entries(on_device, pool.data_ptr())], device="cuda")
    addressed_s = median_s(attention(entries, by_address))
    assert torch.equal(by_id, by_address), "by address something else was read"
    for share in shares:
        num_cold = max(1, int(num_blocks * share))
        cold = host.addresses[:num_cold]
        mixed = torch.tensor([page_entries([*cold, *on_device[num_cold:]], pool.data_ptr())], device="cuda")
        in_place = outputs()
        in_place_s = median_s(attention(mixed, in_place))
        assert torch.equal(by_id, in_place), "in place something else was read"

        def copy(count: int = num_cold) -> None:
            for first in range(0, count, _PIECE_BYTES // size):
                end = min(count, first + _PIECE_BYTES // size)
                pool[first:end].copy_(host.memory[first:end], non_blocking=True)

        copied_s = median_s(copy)
        loss_s = in_place_s - device_s
        line: dict[str, Any] = {
            "tokens": seq_len,
            "host_share": share,
            "attention_ms": round(1e3 * device_s, 3),
            "by_address_ms": round(1e3 * addressed_s, 3),
            "in_place_ms": round(1e3 * in_place_s, 3),
            "in_place_GB/s": round(num_cold * size / in_place_s / 1e9, 1),
            "copy_ms": round(1e3 * copied_s, 3),
            "copy_GB/s": round(num_cold * size / copied_s / 1e9, 1),
            "break_even_steps": round(copied_s / loss_s, 2) if loss_s > 0 else None,
        }
        print(json.dumps(line), flush=True)
    host.close()


def main() -> int:
    """Measures every length."""
    if not torch.cuda.is_available():
        print("bench.attention_host_gpu measures an NVIDIA GPU, and torch finds none on this machine", file=sys.stderr)
        return 1
    for seq_len in LENGTHS:
        measure(seq_len, SHARES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
