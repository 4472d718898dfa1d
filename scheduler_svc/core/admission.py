"""Who may join the queue: bounds in requests, in prompt tokens and in the wait that is expected; of all, and of each tenant.

A refusal says when trying again makes sense: when, at the pace that is expected, there will be room. Knows counts and an expected
wait; does not know who is first.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import Overloaded, QueueFull, QuotaExceeded
from scheduler_svc.core.request import Request
from scheduler_svc.core.tenants import EQUALS, Tenants

_SHORTEST_RETRY_S = 0.1
_LONGEST_RETRY_S = 60.0
_UNKNOWN_RETRY_S = 1.0
"""A queue of hundreds moves within seconds."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of one executor's queue.

    Attributes:
        max_requests, max_tokens: of requests that were never admitted to the batch, and of their prompts.
        max_wait_s: that a request may be expected to wait; None: any time.
        tenants: with bounds of their own.
    """

    max_requests: int
    max_tokens: int
    max_wait_s: float | None = None
    tenants: Tenants = EQUALS


class Admission:
    """See the module's first lines.

    Attributes:
        num_requests: in the queue, never admitted to the batch.
        num_tokens: of their prompts.
    """

    def __init__(self, limits: AdmissionLimits):
        self.num_requests = 0
        self.num_tokens = 0
        self._limits = limits
        self._num_requests_of: Counter[str] = Counter()
        self._num_tokens_of: Counter[str] = Counter()

    def check(self, request: Request, expected_wait_s: Callable[[], float]) -> None:
        """Whether a request may come in. An empty queue takes any one.

        Args:
            request: that would be the next to come.
            expected_wait_s: until it would get its place; 0: not known.

        Raises:
            QueueFull: it would exceed a bound of all.
            QuotaExceeded: it would exceed one of its tenant.
            Overloaded: it would wait longer than anybody may, or until after its deadline.
        """
        limits, num_tokens = self._limits, len(request.prompt_token_ids)
        if self.num_requests >= limits.max_requests:
            wait_s = expected_wait_s()
            raise QueueFull(
                f"{self.num_requests} requests are waiting, the limit is {limits.max_requests}",
                metadata={"maxWaitingRequests": str(limits.max_requests)},
                retry_after_s=_retry_s(wait_s, 1 / max(1, self.num_requests)),
            )
        if self.num_requests and self.num_tokens + num_tokens > limits.max_tokens:
            excess = self.num_tokens + num_tokens - limits.max_tokens
            raise QueueFull(
                f"{self.num_tokens} prompt tokens are waiting, with this request's {num_tokens} it would be more than the "
                f"limit of {limits.max_tokens}",
                metadata={"maxWaitingTokens": str(limits.max_tokens)},
                retry_after_s=_retry_s(expected_wait_s(), excess / self.num_tokens),
            )
        self._check_quota(request, expected_wait_s)
        self._check_wait(request, expected_wait_s)

    def count_in(self, request: Request) -> None:
        """A request is queued."""
        self._count(request, 1)

    def count_out(self, request: Request) -> None:
        """A queued request was admitted to the batch for the first time, or ended before."""
        self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        num_tokens = sign * len(request.prompt_token_ids)
        self.num_requests += sign
        self.num_tokens += num_tokens
        tenant = request.tenant
        self._num_requests_of[tenant] += sign
        self._num_tokens_of[tenant] += num_tokens
        if not self._num_requests_of[tenant]:
            del self._num_requests_of[tenant], self._num_tokens_of[tenant]

    def _check_quota(self, request: Request, expected_wait_s: Callable[[], float]) -> None:
        terms = self._limits.tenants.terms(request.tenant)
        num_requests, num_tokens = self._num_requests_of[request.tenant], self._num_tokens_of[request.tenant]
        num_more = len(request.prompt_token_ids)
        for name, has, more, limit in (
            ("max_waiting_requests", num_requests, 1, terms.max_waiting_requests),
            ("max_waiting_tokens", num_tokens, num_more, terms.max_waiting_tokens),
        ):
            if limit is not None and num_requests and has + more > limit:
                raise QuotaExceeded(
                    f"tenant {request.tenant!r}: {name} is {limit}, {has} are waiting and this request adds {more}",
                    metadata={"tenant": request.tenant, "quota": name, "limit": str(limit)},
                    retry_after_s=_retry_s(expected_wait_s(), (has + more - limit) / has),
                )

    def _check_wait(self, request: Request, expected_wait_s: Callable[[], float]) -> None:
        max_wait_s = self._limits.max_wait_s
        if not self.num_requests or (max_wait_s is None and request.deadline_s is None):
            return
        wait_s = expected_wait_s()
        if max_wait_s is not None and wait_s > max_wait_s:
            raise Overloaded(
                f"a place in the batch is expected in {wait_s:.1f} s, the limit is {max_wait_s:g} s",
                metadata={"expectedWaitS": f"{wait_s:.3f}", "maxWaitS": f"{max_wait_s:g}"},
                retry_after_s=_retry_s(wait_s - max_wait_s, 1.0),
            )
        if request.deadline_s is not None and wait_s > request.deadline_s - request.arrival_s:
            raise Overloaded(
                f"a place in the batch is expected in {wait_s:.1f} s, the deadline is before that",
                metadata={"expectedWaitS": f"{wait_s:.3f}"},
                retry_after_s=_retry_s(wait_s - (request.deadline_s - request.arrival_s), 1.0),
            )


def _retry_s(wait_s: float, share: float) -> float:
    """The time for a share of the queue to go, if a request at its end waits so long."""
    return min(_LONGEST_RETRY_S, max(_SHORTEST_RETRY_S, wait_s * share)) if wait_s > 0 else _UNKNOWN_RETRY_S
