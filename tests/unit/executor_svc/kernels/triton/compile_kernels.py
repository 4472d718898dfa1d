"""Compiles the kernels for one architecture and prints what was compiled; a process of its own, where nothing is interpreted.

Arguments: the architecture (for example 90), the dtype (for example bfloat16) and that of the cache.
"""

import sys

import torch

from executor_svc.core.prefix_groups import MAX_GROUPS
from executor_svc.kernels.batch import LayerCache, Rotary, SharedPrefixes
from executor_svc.kernels.triton.configs import default_config
from executor_svc.kernels.triton.decode import KERNEL as DECODE
from executor_svc.kernels.triton.decode import KERNEL_OF_E4M3, DecodeWorkspace, paged_decode
from executor_svc.kernels.triton.decode_shared import KERNEL as SHARED
from executor_svc.kernels.triton.decode_shared import SharedWorkspace, attend_shared
from executor_svc.kernels.triton.e4m3 import is_e4m3
from executor_svc.kernels.triton.kv_write import rope_write_kv, write_kv
from executor_svc.kernels.triton.parts import gather
from executor_svc.kernels.triton.prefill_kernel import FEW, MANY, triton_prefill
from executor_svc.kernels.triton.stored_form import StoredFormKernels
from executor_svc.kvcache.stored_form import FORMS, stored_layout
from executor_svc.model.layer_spec import LayerSpec
from tests.unit.executor_svc.kernels.triton.compile_only import compiling_for

# Heads, KV heads, head_dim_k, head_dim_v, window, softcap, sinks.
ATTENTION = [
    (32, 8, 128, 128, None, None, False),
    (4, 1, 256, 256, 64, 50.0, False),
    (9, 3, 64, 64, 64, None, True),
]


def compile_forms(capability: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    forms = ATTENTION if cache_dtype == dtype else ATTENTION[:1]
    for num_heads, num_kv_heads, head_dim_k, head_dim_v, window, softcap, with_sinks in forms:
        cache = LayerCache(
            torch.zeros(2, num_kv_heads, 16, head_dim_k, dtype=cache_dtype),
            torch.zeros(2, num_kv_heads, 16, head_dim_v, dtype=cache_dtype),
        )
        query = torch.zeros(2, num_heads, head_dim_k, dtype=dtype)
        out = torch.zeros(2, num_heads, head_dim_v, dtype=dtype)
        tables, lens = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        sinks = torch.zeros(num_heads, dtype=dtype) if with_sinks else None
        workspace = DecodeWorkspace(2, num_heads, head_dim_v, 4, "cpu")
        paged_decode(
            query, cache, tables, lens, out, scale=0.1, window=window, softcap=softcap, sinks=sinks,
            workspace=workspace, config=default_config(KERNEL_OF_E4M3 if is_e4m3(cache) else DECODE, capability),
        )  # fmt: skip
        if (window, softcap) == (None, None):  # blocks by address
            paged_decode(
                query, cache, tables.long(), lens, out, scale=0.1, window=None, softcap=None, sinks=None,
                workspace=workspace, config=default_config(DECODE, capability),
            )  # fmt: skip
        groups = torch.zeros(MAX_GROUPS, dtype=torch.int32)
        for_shared = SharedWorkspace(2, num_heads, num_kv_heads, head_dim_v, 4, "cpu")
        parts = attend_shared(
            query, cache, tables, SharedPrefixes(groups, groups, lens, lens), scale=0.1, softcap=softcap,
            workspace=for_shared, config=default_config(SHARED, capability),
        )  # fmt: skip
        paged_decode(
            query, cache, tables, lens, out, scale=0.1, window=None, softcap=softcap, sinks=sinks, workspace=workspace,
            config=default_config(DECODE, capability), shared=parts,
        )  # fmt: skip
        for kernel in (FEW, MANY):
            triton_prefill(
                query, cache, tables, torch.zeros(3, dtype=torch.int32), lens, out, scale=0.1, window=window, softcap=softcap,
                sinks=sinks, config=default_config(kernel, capability),
            )  # fmt: skip


def compile_reads_and_writes(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    cache = LayerCache(torch.zeros(2, 3, 16, 64, dtype=cache_dtype), torch.zeros(2, 3, 16, 64, dtype=cache_dtype))
    gather(cache, torch.zeros(2, dtype=torch.int32), 3, 20, dtype)
    heads, slots = torch.zeros(2, 3, 64, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    write_kv(heads, heads, slots, cache)
    table = torch.zeros(5, 48)
    rope_write_kv(
        torch.zeros(2, 15 * 64, dtype=dtype), slots, slots, cache, torch.zeros(2, 9, 64, dtype=dtype), num_heads=9,
        num_kv_heads=3, head_dim=64, rotary=Rotary(table, table), q_norm_weight=heads[0, 0], k_norm_weight=heads[0, 0],
    )  # fmt: skip


def compile_stored_forms(dtype: torch.dtype) -> None:
    layout = stored_layout([LayerSpec(0, 2, 64, 64, 1.0, None, None, False)], 16, dtype)
    blocks, stored = (torch.zeros(1, size, dtype=torch.uint8) for size in (layout.native_bytes, layout.stored_bytes))
    for form in FORMS.values():
        StoredFormKernels(form, layout, "cpu").compile(blocks, stored)


def main() -> None:
    capability, dtype, cache_dtype = int(sys.argv[1]), getattr(torch, sys.argv[2]), getattr(torch, sys.argv[3])
    with compiling_for(capability) as device:
        compile_forms(capability, dtype, cache_dtype)
        compile_reads_and_writes(dtype, cache_dtype)
        if cache_dtype == dtype:
            compile_stored_forms(dtype)
    print(*device.compiled)


if __name__ == "__main__":
    main()
