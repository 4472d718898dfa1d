"""Who may listen where, and who may call."""

from pathlib import Path

import pytest

from common.errors import PermissionDenied, StartupError, Unauthenticated
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity
from common.rpc.security import ServerSecurity

_PEM = Path("/nowhere/x.pem")
EVERYWHERE = Address.parse("0.0.0.0:50051")


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "unix:/run/s.sock", "localhost:1"])
def test_this_host_needs_no_protection(listen: str) -> None:
    ServerSecurity().check_listen(Address.parse(listen))


@pytest.mark.parametrize(
    "security",
    [
        ServerSecurity(),
        ServerSecurity(token="t"),
        ServerSecurity(tls_cert=_PEM, tls_key=_PEM),
        ServerSecurity(tls_client_ca=_PEM),
    ],
)
def test_other_hosts_are_refused_without_tls_and_token(security: ServerSecurity) -> None:
    with pytest.raises(StartupError, match="reachable from other hosts"):
        security.check_listen(EVERYWHERE)


@pytest.mark.parametrize(
    "security",
    [
        ServerSecurity(tls_cert=_PEM, tls_key=_PEM, token="t"),
        ServerSecurity(tls_cert=_PEM, tls_key=_PEM, tls_client_ca=_PEM),
        ServerSecurity(insecure=True),
    ],
)
def test_other_hosts_are_served_when_protected_or_asked_for(security: ServerSecurity) -> None:
    security.check_listen(EVERYWHERE)


def test_files_that_cannot_be_read_are_named() -> None:
    with pytest.raises(StartupError, match=r"/nowhere/x\.pem"):
        ServerSecurity(tls_cert=_PEM, tls_key=_PEM).credentials()
    with pytest.raises(StartupError, match=r"/nowhere/x\.pem"):
        ChannelSecurity(tls_ca=_PEM).credentials()


@pytest.mark.parametrize("security", [ServerSecurity(tls_cert=_PEM), ServerSecurity(tls_key=_PEM)])
def test_half_of_a_pair_is_refused(security: ServerSecurity) -> None:
    """A plain port in spite of a certificate would be the worst reading of a forgotten key."""
    with pytest.raises(StartupError, match="both"):
        security.credentials()


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "Basic user", "Bearer user ", "bearer user", "user"]
)
def test_a_missing_or_wrong_token_is_unauthenticated(authorization: str | None) -> None:
    security = ServerSecurity(token="user", admin_token="admin")
    for admin in (False, True):
        with pytest.raises(Unauthenticated):
            security.check_call(authorization, admin=admin)


def test_the_users_token_is_not_good_for_operators_but_theirs_is_for_all() -> None:
    security = ServerSecurity(token="user", admin_token="admin")

    security.check_call("Bearer user", admin=False)
    security.check_call("Bearer admin", admin=False)
    security.check_call("Bearer admin", admin=True)
    with pytest.raises(PermissionDenied):
        security.check_call("Bearer user", admin=True)


def test_one_token_is_good_for_both() -> None:
    security = ServerSecurity(token="user")

    security.check_call("Bearer user", admin=True)
    with pytest.raises(Unauthenticated):
        security.check_call(None, admin=True)


def test_without_tokens_everybody_may_call() -> None:
    ServerSecurity().check_call(None, admin=True)
    ServerSecurity(admin_token="admin").check_call(None, admin=False)


def test_no_secret_is_in_a_repr() -> None:
    assert "hunter2" not in repr(ServerSecurity(token="hunter2", admin_token="hunter2")) + repr(ChannelSecurity(token="hunter2"))
