import hashlib

import pytest

from common.errors import InvalidParameter, PermissionDenied
from scheduler_svc.edge.callers import ANYBODY, TENANT_KEY, Callers

CALLERS = Callers({hashlib.sha256(b"secret").hexdigest(): "acme"})


def test_a_tenants_token_says_who_calls() -> None:
    assert CALLERS.tenant([("authorization", "Bearer secret")]) == "acme"
    assert CALLERS.tenant([("authorization", "Bearer secret"), (TENANT_KEY, "acme")]) == "acme"


def test_a_gateway_with_the_servers_token_says_for_whom_it_calls() -> None:
    assert CALLERS.tenant([("authorization", "Bearer server"), (TENANT_KEY, "acme")]) == "acme"
    assert ANYBODY.tenant([(TENANT_KEY, "acme")]) == "acme"


def test_who_says_nothing_is_nobody_in_particular() -> None:
    assert CALLERS.tenant([("authorization", "Bearer server")]) == ""
    assert ANYBODY.tenant(None) == ""


def test_no_tenant_can_pass_for_another() -> None:
    with pytest.raises(PermissionDenied):
        CALLERS.tenant([("authorization", "Bearer secret"), (TENANT_KEY, "other")])


def test_a_name_has_a_limit() -> None:
    with pytest.raises(InvalidParameter, match="at most 128"):
        ANYBODY.tenant([(TENANT_KEY, "x" * 129)])
