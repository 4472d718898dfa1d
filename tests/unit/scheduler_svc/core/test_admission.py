import pytest

from common.errors import Overloaded, QueueFull, QuotaExceeded
from common.ids import RequestId
from scheduler_svc.core.admission import Admission, AdmissionLimits
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.core.tenants import Tenants, TenantTerms
from tests.unit.scheduler_svc.core.rig import ROOT


def request(num_tokens: int = 10, tenant: str = "a", deadline_s: float | None = None) -> Request:
    stop = StopConditions(5)
    return Request(RequestId("r"), (1,) * num_tokens, SamplingParams(), stop, ROOT, 100.0, tenant=tenant, deadline_s=deadline_s)


def filled(limits: AdmissionLimits, num: int) -> Admission:
    admission = Admission(limits)
    for _ in range(num):
        admission.check(request(), lambda: 0.0)
        admission.count_in(request())
    return admission


def test_a_full_queue_says_when_the_next_place_is_free() -> None:
    admission = filled(AdmissionLimits(4, 1000), 4)
    with pytest.raises(QueueFull, match="limit is 4") as refused:
        admission.check(request(), lambda: 8.0)
    assert refused.value.retry_after_s == 2.0
    admission.count_out(request())
    admission.check(request(), lambda: 8.0)


def test_too_many_tokens_say_when_enough_are_gone() -> None:
    admission = filled(AdmissionLimits(100, 40), 4)
    with pytest.raises(QueueFull, match="limit of 40") as refused:
        admission.check(request(20), lambda: 6.0)
    assert refused.value.retry_after_s == 3.0


def test_a_delay_that_nobody_knows_is_a_second() -> None:
    with pytest.raises(QueueFull) as refused:
        filled(AdmissionLimits(1, 1000), 1).check(request(), lambda: 0.0)
    assert refused.value.retry_after_s == 1.0


def test_a_tenant_has_bounds_of_its_own_and_others_go_on() -> None:
    tenants = Tenants({"a": TenantTerms(max_waiting_requests=2), "b": TenantTerms(max_waiting_tokens=15)})
    admission = filled(AdmissionLimits(100, 1000, tenants=tenants), 2)
    with pytest.raises(QuotaExceeded, match="'a': max_waiting_requests is 2"):
        admission.check(request(), lambda: 4.0)
    admission.check(request(tenant="b"), lambda: 4.0)
    admission.count_in(request(tenant="b"))
    with pytest.raises(QuotaExceeded, match="'b': max_waiting_tokens is 15, 10 are waiting and this request adds 10"):
        admission.check(request(tenant="b"), lambda: 4.0)
    admission.check(request(tenant="c"), lambda: 4.0)


def test_who_would_wait_too_long_is_told_at_once() -> None:
    admission = filled(AdmissionLimits(100, 1000, max_wait_s=5.0), 2)
    admission.check(request(), lambda: 5.0)
    with pytest.raises(Overloaded, match=r"expected in 7.0 s, the limit is 5 s") as refused:
        admission.check(request(), lambda: 7.0)
    assert refused.value.retry_after_s == 2.0


def test_who_would_wait_until_after_its_deadline_is_told_at_once() -> None:
    admission = filled(AdmissionLimits(100, 1000), 2)
    admission.check(request(deadline_s=103.0), lambda: 3.0)
    with pytest.raises(Overloaded, match="the deadline is before that"):
        admission.check(request(deadline_s=103.0), lambda: 3.5)


def test_an_empty_queue_takes_any_request() -> None:
    tenants = Tenants({"a": TenantTerms(max_waiting_tokens=1)})
    Admission(AdmissionLimits(1, 1, 0.1, tenants)).check(request(1000), lambda: 9.0)
