"""Rows of e4m3 in Triton: exponents and bytes of what is written, operands of what is read. The format: kernels/e4m3.py.

Powers of two are made from their bits. What is read is multiplied as float16, which holds every e4m3 value: the hardware turns
two bytes into two of them in one instruction, four times less than bfloat16 takes. Exponents stay outside of the products:

    keys      score * 2 ** exponent
    values    exp2(score + exponent - highest): a weight with its value's exponent, at most 1, whatever the exponents are. Sums of
              weights take the exponent off again, in float32.
"""

import torch
import triton
import triton.language as tl
from triton import knobs

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.e4m3 import EXPONENT_RANGE

LOWEST_EXPONENT = tl.constexpr(EXPONENT_RANGE[0])
HIGHEST_EXPONENT = tl.constexpr(EXPONENT_RANGE[1])
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


def is_e4m3(layer_cache: LayerCache) -> bool:
    """Whether a cache holds rows of e4m3."""
    return layer_cache.key.dtype == torch.float8_e4m3fn


@triton.jit
def power_of_two(exponents):
    """2 ** (exponents - 127) as float32, for exponents from 1 to 254."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponents_for(largest):
    """The exponents of rows whose largest absolute values these are."""
    # Past 1.75 times a power of two, which 448 is, the next one is needed.
    found = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    return tl.minimum(tl.maximum(found, LOWEST_EXPONENT), HIGHEST_EXPONENT)


@triton.jit
def encoded(values, exponents):
    """Float32 values as bytes of e4m3 of rows with these exponents."""
    return to_e4m3(values * power_of_two(254 - exponents))


@triton.jit
def to_e4m3(values):
    """Float32 values as bytes of e4m3, to the nearest, ties to even, too large ones to the largest.

    In integers, because conversions of floats round differently where kernels are interpreted, and older cards have none.
    """
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 steps are 2 ** -9: that is the last bit of 2 ** 14.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(codes):
    """Bytes of e4m3 as float32, on any card: float16 has one exponent bit more, which makes every value 256 times smaller."""
    wide = codes.to(tl.int32)
    halves = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16)
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def load_exponents(part_ptr, blocks, stride, kv_head, in_block, inside, ROWS_BYTES: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Exponents of one head's rows, int32; those of 1 where inside is false.

    Each as the word that it lies in: loads of 32 bits of a loop are staged through shared memory by the compiler, together with
    those of keys. Narrower ones are not, and every tile would wait for them.

    Args:
        part_ptr: keys or values of a layer in block 0.
        blocks: int64 [tile], 0 where inside is false: what is read there is thrown away.
        stride: bytes between blocks.
        kv_head: the head.
        in_block: [tile] of each row.
        inside: bool [tile].
        ROWS_BYTES: of all rows of the part.
        BLOCK_SIZE: of a block.
    """
    in_part = ROWS_BYTES + kv_head * BLOCK_SIZE + in_block
    words = tl.load(part_ptr.to(tl.pointer_type(tl.int32)) + (blocks * (stride // 4) + in_part // 4))
    return tl.where(inside, (words >> (in_part % 4 * 8)) & 0xFF, 127)


@triton.jit
def as_operand(query):
    """Rows of queries as an operand beside e4m3, and the factor of each row that this left out."""
    factors = tl.full([query.shape[0]], 1.0, tl.float32)
    if query.dtype != tl.float32:
        # Beyond float16's range are bfloat16 queries: each row is brought to between 1 and 2.
        wide = query.to(tl.float32)
        powers = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23
        powers = tl.minimum(tl.maximum(powers, 1), 253)
        factors = power_of_two(powers)
        query = (wide * power_of_two(254 - powers)[:, None]).to(tl.float16)
    return query, factors


@triton.jit
def load_pairs(part_ptr, rows, inside, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Rows of e4m3 as pairs of neighbours, uint16 [tile, PADDED // 2], zeros where inside is false.

    The second operand of a product has to be turned on its way out of shared memory, which the hardware does for elements of 16
    bits, and the compiler byte by byte for those of 8. So it is turned in pairs: see halves_of.

    Args:
        part_ptr: a head's rows in block 0.
        rows: int64 [tile], where in bytes each begins.
        inside: bool [tile].
        HEAD_DIM: even.
        PADDED: at least HEAD_DIM.
    """
    pairs = tl.arange(0, PADDED // 2)
    mask = inside[:, None]
    if PADDED != HEAD_DIM:
        mask = mask & (pairs < HEAD_DIM // 2)[None, :]
    starts = rows // 2
    if HEAD_DIM % 16 == 0:
        starts = tl.multiple_of(starts, 8)
    return tl.load(part_ptr.to(tl.pointer_type(tl.uint16)) + starts[:, None] + pairs[None, :], mask=mask, other=0)


@triton.jit
def halves_of(pairs, dtype: tl.constexpr):
    """The first of each pair, and the second, as dtype."""
    if INTERPRETED or dtype != tl.float16:
        first = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
        second = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        # Two pairs lie in a register: one permutation of its bytes and two conversions, not the compiler's eight instructions.
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 firsts, seconds;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second


@triton.jit
def scaled_softmax_step(scores, exponents, highest_before, total):
    """As softmax_step; weights have the exponents of their values in them, total has not.

    highest is the largest of scores and exponents together: sums and parts that are relative to it add up as any others.
    """
    scores += (exponents - 127).to(tl.float32)[None, :]
    highest = tl.maximum(highest_before, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    factor = tl.exp2(highest_before - highest)
    plain = weights * power_of_two(254 - exponents)[None, :]
    return weights, factor, highest, total * factor + tl.sum(plain, 1)
