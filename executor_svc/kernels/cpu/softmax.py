"""A softmax over keys that come span by span. Knows one row of scores and what was summed before; not what they are of."""

import numpy as np
from numba import njit

from executor_svc.kernels.cpu.exponential import vexp, vtanh
from executor_svc.kernels.cpu.vector import (
    LANES,
    keep_out_of_line,
    load_f32,
    store_f32,
    vkeep_between,
    vload,
    vmax,
    vmax_lanes,
    vsplat,
    vstore,
    vsum,
)

NEGATIVE_INFINITY = np.float32(-np.inf)
"""The largest score of no keys."""
_ZERO = np.float32(0.0)


@njit(error_model="numpy")
def fold_softmax(softcap, low, high, width, scores, acc, acc_width, maximum, weight_sum):  # type: ignore[no-untyped-def]
    """Turns scores of columns low <= c < high into weights, 0 elsewhere, and rescales what was summed before.

    Args:
        softcap: float64, scores are held below it by a tanh; 0: they are not.
        low: the first column that counts.
        high: the first behind those that count.
        width: columns of the span, a multiple of LANES.
        scores: address of float32 [width]; weights afterwards.
        acc: address of float32 [acc_width], values summed so far.
        acc_width: a multiple of LANES.
        maximum: address of the largest score so far, float32.
        weight_sum: address of the sum of weights so far, float32.
    """
    keep_out_of_line()
    before = load_f32(maximum)
    first, last = low // LANES * LANES, min((high + LANES - 1) // LANES * LANES, width)
    if high <= low:
        first, last = 0, 0
    largest = vsplat(NEGATIVE_INFINITY)
    for c in range(first, last, LANES):
        score = vload(scores + 4 * c, "f32")
        if softcap != _ZERO:
            score = vtanh(score / vsplat(softcap)) * vsplat(softcap)
        if c < low or c + LANES > high:
            score = vkeep_between(score, low - c, high - c, NEGATIVE_INFINITY)
        if softcap != _ZERO or c < low or c + LANES > high:
            vstore(scores + 4 * c, score, "f32")
        largest = vmax(score, largest)
    now = max(before, vmax_lanes(largest))
    zero = vsplat(_ZERO)
    for c in range(0, first, LANES):
        vstore(scores + 4 * c, zero, "f32")
    for c in range(last, width, LANES):
        vstore(scores + 4 * c, zero, "f32")
    if now == NEGATIVE_INFINITY:
        return
    total = zero
    shift = vsplat(now)
    for c in range(first, last, LANES):
        weight = vexp(vload(scores + 4 * c, "f32") - shift)
        vstore(scores + 4 * c, weight, "f32")
        total = total + weight
    new_sum = vsum(total)
    if now != before:
        correction = vexp(vsplat(np.float32(before - now)))
        for c in range(0, acc_width, LANES):
            vstore(acc + 4 * c, vload(acc + 4 * c, "f32") * correction, "f32")
        new_sum += load_f32(weight_sum) * vmax_lanes(correction)
        store_f32(maximum, now)
    else:
        new_sum += load_f32(weight_sum)
    store_f32(weight_sum, new_sum)
