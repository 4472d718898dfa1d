import pytest

from common.errors import QuotaExceeded
from common.ids import RequestId
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.core.tenants import Tenants, TenantTerms
from scheduler_svc.core.token_rates import TokenRates
from tests.unit.scheduler_svc.core.rig import ROOT


def asks(num_tokens: int, tenant: str = "a") -> Request:
    """For a prompt of one token and the rest."""
    return Request(RequestId("r"), (1,), SamplingParams(), StopConditions(num_tokens - 1), ROOT, 0.0, tenant=tenant)


def rates() -> TokenRates:
    return TokenRates(Tenants({"a": TenantTerms(tokens_per_s=10.0, burst_tokens=100)}))


def test_a_burst_at_once_and_then_the_rate() -> None:
    buckets = rates()
    buckets.take(asks(100), 0.0)
    with pytest.raises(QuotaExceeded) as refused:
        buckets.take(asks(30), 1.0)
    assert refused.value.retry_after_s == pytest.approx(2.0)
    buckets.take(asks(30), 1.0 + 2.0)


def test_a_request_above_the_burst_passes_when_all_is_there_and_costs_the_next_its_time() -> None:
    buckets = rates()
    buckets.take(asks(150), 0.0)
    with pytest.raises(QuotaExceeded) as refused:
        buckets.take(asks(10), 0.0)
    assert refused.value.retry_after_s == pytest.approx(6.0)


def test_what_is_refused_elsewhere_is_given_back() -> None:
    buckets = rates()
    buckets.take(asks(100), 0.0)
    buckets.give_back(asks(100))
    buckets.take(asks(100), 0.0)


def test_who_has_no_rate_may_ask_for_anything() -> None:
    for _ in range(10):
        rates().take(asks(10**9, "b"), 0.0)
