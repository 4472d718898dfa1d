"""One draw from one row of logits: temperature, top-k, top-p, min-p. Pure arithmetic; the random number is passed in.

Rows are computed one by one, so that a row's token cannot depend on its neighbours, and stays in the processor's cache.
"""

import math

import numpy as np
import numpy.typing as npt

from executor_svc.core.sampling import SamplingParams

Row = npt.NDArray[np.float32]
_LIKELY = -10.0
"""Filters look at tokens within this distance of the best first. Seldom is that not enough; then they sort everything."""


def draw_token(logits: Row, params: SamplingParams, uniform: float) -> int:
    """The inverse of the cumulative distribution, in order of token id.

    Args:
        logits: [vocab_size], the largest finite; not changed.
        params: temperature above 0, top_k, top_p, min_p.
        uniform: in [0, 1).

    Returns:
        A token id whose probability is above 0.
    """
    with np.errstate(over="ignore"):  # a tiny temperature makes all but the best minus infinity
        scaled = (logits - logits.max()) / np.float32(params.temperature)
    if not params.has_filters:
        return _inverse_cdf(scaled, uniform)
    ids = kept_ids(scaled, params)
    return int(ids[_inverse_cdf(scaled[ids], uniform)])


def _inverse_cdf(scaled: Row, uniform: float) -> int:
    """Index of the first token whose cumulative probability is above uniform."""
    cumulative = np.cumsum(np.exp(scaled), dtype=np.float64)
    total = cumulative[-1]
    at = np.searchsorted(cumulative, uniform * total, side="right")
    last = np.searchsorted(cumulative, total)  # where rounding carries the number to the very end
    return int(min(at, last))


def kept_ids(scaled: Row, params: SamplingParams) -> npt.NDArray[np.intp]:
    """Ids of the tokens that top-k, then top-p, then min-p keep, ascending; tokens equal to the last one stay too.

    Args:
        scaled: [vocab_size], divided by temperature, the largest 0.
        params: one of the filters is on.
    """
    cut = _LIKELY
    ids = np.flatnonzero(scaled >= cut)
    floor = _floor(scaled, scaled[ids], params)
    if floor is None or floor < cut:
        ids = np.arange(len(scaled))
        floor = _floor(scaled, scaled, params)
        assert floor is not None
    return ids[scaled[ids] >= floor]


def _floor(scaled: Row, candidates: Row, params: SamplingParams) -> float | None:
    """Smallest logit that is kept, if the candidates, the largest of scaled, decide it; None: they do not."""
    top_k = params.top_k if 0 < params.top_k < len(scaled) else 0
    if len(candidates) < top_k:
        return None
    is_all = len(candidates) == len(scaled)
    floor = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if not top_k and params.top_p >= 1:
        return floor
    ordered = np.sort(candidates)[::-1]
    if top_k:
        floor = max(floor, float(ordered[top_k - 1]))
        ordered = ordered[ordered >= ordered[top_k - 1]]
    if params.top_p < 1:
        weights = np.exp(ordered, dtype=np.float64)
        cumulative = np.cumsum(weights)
        # Probabilities are those among the tokens that top-k keeps.
        mass = params.top_p * (cumulative[-1] if top_k or is_all else np.exp(scaled).sum(dtype=np.float64))
        if cumulative[-1] < mass and not is_all:
            return None
        num_kept = max(1, int(np.count_nonzero(cumulative - weights < mass)))
        floor = max(floor, float(ordered[num_kept - 1]))
    return floor
