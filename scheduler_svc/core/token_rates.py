"""How many tokens each tenant may ask for: a bucket of each, filled at its rate, never above its burst.

Pure: time is an argument.
"""

from dataclasses import dataclass

from common.errors import QuotaExceeded
from scheduler_svc.core.request import Request
from scheduler_svc.core.tenants import Tenants


@dataclass(slots=True)
class _Bucket:
    num_tokens: float
    filled_at_s: float


class TokenRates:
    """See the module's first line. A tenant without a rate costs nothing here."""

    def __init__(self, tenants: Tenants):
        self._tenants = tenants
        self._buckets: dict[str, _Bucket] = {}

    def take(self, request: Request, now_s: float) -> None:
        """Takes the request's prompt tokens and max_tokens of all samples. One above the burst passes when the bucket is full.

        Raises:
            QuotaExceeded: so many are not there; retry_after_s says when they will be.
        """
        terms = self._tenants.terms(request.tenant)
        if terms.tokens_per_s is None:
            return
        burst = float(terms.burst_tokens)
        bucket = self._buckets.setdefault(request.tenant, _Bucket(burst, now_s))
        elapsed_s = max(0.0, now_s - bucket.filled_at_s)
        bucket.num_tokens = min(burst, bucket.num_tokens + terms.tokens_per_s * elapsed_s)
        bucket.filled_at_s = now_s
        num_tokens = _num_tokens(request)
        missing = min(num_tokens, burst) - bucket.num_tokens
        if missing > 1e-6:
            raise QuotaExceeded(
                f"tenant {request.tenant!r}: {num_tokens} tokens are asked for, {int(bucket.num_tokens)} are left of "
                f"{terms.tokens_per_s:g} tokens/s and a burst of {terms.burst_tokens}",
                metadata={"tenant": request.tenant, "quota": "tokens_per_s", "limit": f"{terms.tokens_per_s:g}"},
                retry_after_s=missing / terms.tokens_per_s,
            )
        bucket.num_tokens -= num_tokens  # may go below 0 for one above the burst: the next waits that much longer

    def give_back(self, request: Request) -> None:
        """The request was refused for another reason."""
        bucket = self._buckets.get(request.tenant)
        if bucket is not None:
            bucket.num_tokens += _num_tokens(request)


def _num_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + request.n * request.stop.max_tokens
