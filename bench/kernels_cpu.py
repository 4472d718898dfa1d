"""CPU kernels beside the library's, on the shapes of SmolLM2-135M: a table of kernel, shape, ms, library ms, ratio.

    python bench/kernels_cpu.py [--threads 2] [--layers 30] [--repeats 9]

Products run over the weights of so many layers, so that they come from memory as in a model. Both sides are run in turn and
the medians are shown; on a machine with other work only the ratios count.
"""

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.batch import AttentionBatch, LayerCache
from executor_svc.kernels.cpu import CpuBackend
from executor_svc.kernels.cpu.norm import rms_norm
from executor_svc.kernels.cpu.packed_weight import PackedWeight, pack
from executor_svc.model.quantize import quantize_weight

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 576, 1536, 9, 3, 64, 16
SHAPES = (((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * MLP, HIDDEN), (HIDDEN, MLP))
ROWS = (1, 2, 4, 8, 16, 24, 32, 64, 128, 512)

W = TypeVar("W", Tensor, PackedWeight)
Step = tuple[Tensor, Tensor, Tensor, list[LayerCache], AttentionBatch]
Case = tuple[str, str, Callable[[], object], Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table(title=f"{options.threads} threads, {options.layers} layers")
    for column in ("kernel", "shape", "ms", "library ms", "ratio"):
        table.add_column(column, justify="left" if column in ("kernel", "shape") else "right")
    with torch.inference_mode():
        for name, shape, ours, library in (
            product_cases(options.layers) + attention_cases(options.layers) + norm_cases(options.layers)
        ):
            ours_ms, library_ms = medians_ms((ours, library), options.repeats)
            table.add_row(name, shape, f"{ours_ms:.2f}", f"{library_ms:.2f}", f"{library_ms / ours_ms:.2f}")
    Console(width=100).print(table)


def all_cases(layers: int) -> list[Case]:
    return product_cases(layers) + attention_cases(layers) + norm_cases(layers)


def product_cases(layers: int) -> list[Case]:
    """All linear layers of a model, float32 and int8, against F.linear in float32."""
    weights = [[torch.randn(shape) for shape in SHAPES] for _ in range(layers)]
    packed = [[pack(w) for w in layer] for layer in weights]
    quantized = [[quantize_weight(w) for w in layer] for layer in weights]
    packed_int8 = [[pack(q.values, scales=q.scales) for q in layer] for layer in quantized]
    cases: list[Case] = []
    for num_rows in ROWS:
        x = {width: torch.randn(num_rows, width) for width in (HIDDEN, MLP)}
        library = products(weights, lambda w, x=x: functional.linear(x[w.shape[1]], w))  # type: ignore[misc]
        for name, chosen in (("linear f32", packed), ("linear int8", packed_int8)):
            cases.append((name, f"{num_rows} rows", products(chosen, lambda w, x=x: w.apply(x[w.in_features])), library))  # type: ignore[misc]
    return cases


def products(layers: list[list[W]], product: Callable[[W], object]) -> Callable[[], None]:
    def run() -> None:
        for layer in layers:
            for weight in layer:
                product(weight)

    return run


def attention_cases(layers: int) -> list[Case]:
    """Paged attention of all layers against scaled_dot_product_attention over gathered, padded keys."""
    backend = CpuBackend()
    cases: list[Case] = []
    mixes = (("1 decode", [128], 1), ("16 decodes", [300] * 16, 1), ("1 decode", [8000], 1), ("chunk", [512], 512))
    for name, seq_lens, query_len in mixes:
        step = random_step(seq_lens, query_len, layers)
        cases.append((name, f"{seq_lens[0]} keys", lambda s=step: paged(backend, s), lambda s=step: gathered(s)))  # type: ignore[misc]
    return cases


def random_step(seq_lens: list[int], query_len: int, layers: int) -> Step:
    blocks = -(-seq_lens[0] // BLOCK)
    tables = torch.randperm(len(seq_lens) * blocks).view(len(seq_lens), blocks).int()
    positions = torch.arange(seq_lens[0] - query_len, seq_lens[0])
    slots = (tables[:, positions // BLOCK].long() * BLOCK + positions % BLOCK).flatten()
    num_tokens = len(slots)
    batch = AttentionBatch(
        slot_mapping=slots,
        block_tables=tables,
        cu_seqlens_q=torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_decodes=len(seq_lens) if query_len == 1 else 0,
        max_seqlen_q=query_len,
        max_seqlen_k=seq_lens[0],
        block_size=BLOCK,
    )
    caches = [
        LayerCache(torch.randn(tables.numel(), KV_HEADS, HEAD_DIM, BLOCK), torch.randn(tables.numel(), KV_HEADS, BLOCK, HEAD_DIM))
        for _ in range(layers)
    ]
    query, key, value = (torch.randn(num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return query, key, value, caches, batch


def paged(backend: CpuBackend, step: Step) -> None:
    query, key, value, caches, batch = step
    for cache in caches:
        backend.paged_attention(query, key, value, cache, batch, scale=HEAD_DIM**-0.5, window=None, softcap=None, sinks=None)


def gathered(step: Step) -> None:
    query, _, _, caches, batch = step
    tables = batch.block_tables.long()
    num_seqs = batch.num_seqs
    for cache in caches:
        keys = cache.key[tables].permute(0, 2, 1, 4, 3).flatten(2, 3)
        values = cache.value[tables].permute(0, 2, 1, 3, 4).flatten(2, 3)
        rows = query.view(num_seqs, -1, HEADS, HEAD_DIM).transpose(1, 2)
        functional.scaled_dot_product_attention(
            rows,
            keys[:, :, : batch.max_seqlen_k],
            values[:, :, : batch.max_seqlen_k],
            is_causal=rows.shape[2] > 1,
            enable_gqa=True,
        )


def norm_cases(layers: int) -> list[Case]:
    """Two norms a layer."""
    cases: list[Case] = []
    weight = torch.rand(HIDDEN)
    for num_rows in (1, 16, 512):
        x = torch.randn(num_rows, HIDDEN)
        cases.append(
            (
                "rms norm",
                f"{num_rows} rows",
                lambda x=x: [rms_norm(x, weight, 1e-5) for _ in range(2 * layers)],  # type: ignore[misc]
                lambda x=x: [functional.rms_norm(x, (HIDDEN,), weight, 1e-5) for _ in range(2 * layers)],  # type: ignore[misc]
            )
        )
    return cases


def medians_ms(functions: tuple[Callable[[], object], ...], repeats: int) -> list[float]:
    """Medians of the functions' times, run in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for found, function in zip(times, functions, strict=True):
            start = time.perf_counter()
            function()
            found.append(time.perf_counter() - start)
    return [sorted(found[1:])[repeats // 2] * 1e3 for found in times]


if __name__ == "__main__":
    main()
