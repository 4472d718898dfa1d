"""Kernels that begin before the one in front of them has ended (programmatic dependent launch, from compute capability 9.0 on).

Knows two instructions and a prefetch; no tensor and no model. A kernel that takes part says at once that the next one may be
launched, fetches what nobody writes (weights) into the second-level cache, and waits before it touches anything else:

    previous kernel   ....computes....|
    this kernel            | weights on their way .... | wait | computes ....|

A kernel may only be launched with `launch_pdl` if it waits: then all that came before the previous kernel has ended too.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlap_on(device: torch.device, asked: bool | None) -> bool:
    """Whether a kernel is to take part: as asked, or where the device can."""
    return can_overlap(device) if asked is None else asked


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The next kernel may be launched while this one runs."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """After it, everything that earlier kernels wrote is there."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def fetch_rows(start, row_stride_bytes, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, THREADS: tl.constexpr):
    """Has ROW_BYTES of each of ROWS rows brought into the second-level cache, split so that every thread asks once.

    start is the first row's address, int64; ROWS and THREADS are powers of two, ROW_BYTES a multiple of 16 times the parts.
    """
    PARTS: tl.constexpr = 1 if ROWS >= THREADS else THREADS // ROWS
    index = tl.arange(0, ROWS * PARTS)
    part_bytes: tl.constexpr = ROW_BYTES // PARTS
    address = start + (index // PARTS).to(tl.int64) * row_stride_bytes + (index % PARTS) * part_bytes
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
        "=r,l,r",
        [address, tl.full([ROWS * PARTS], part_bytes, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
