"""Which tenant a call is of: by its credential. Pure; whether the call may be made at all was checked before.

A caller with a tenant's token is that tenant. A caller with the server's own token, or of a server that asks for none, is its
operator's: a gateway may say for which tenant it calls, in the metadata TENANT_KEY.
"""

import hashlib
from collections.abc import Iterable, Mapping

from common.errors import InvalidParameter, PermissionDenied

TENANT_KEY = "octavo-tenant"
MAX_TENANT_CHARACTERS = 128


class Callers:
    """See the module's first lines.

    Args:
        tenant_of_token: tenants that have a token, by SHA-256 of it, hexadecimal.
    """

    def __init__(self, tenant_of_token: Mapping[str, str]):
        self._tenant_of_token = tenant_of_token

    def tenant(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
        """Of a call with this metadata; empty: nobody in particular.

        Raises:
            PermissionDenied: it names another tenant than its token's.
            InvalidParameter: the name is too long.
        """
        values = dict(metadata or ())
        named = values.get(TENANT_KEY, "")
        if not isinstance(named, str) or len(named) > MAX_TENANT_CHARACTERS:
            raise InvalidParameter(f"metadata {TENANT_KEY}", f"has {len(named)} characters, at most {MAX_TENANT_CHARACTERS}")
        _, _, token = str(values.get("authorization", "")).partition(" ")
        # A digest is looked up, not the token: how long that takes says nothing about other tokens.
        owner = self._tenant_of_token.get(hashlib.sha256(token.encode()).hexdigest()) if token else None
        if owner is None:
            return named
        if named not in ("", owner):
            raise PermissionDenied(f"{TENANT_KEY}: this token is of another tenant")
        return owner


ANYBODY = Callers({})
"""No tenant has a token."""
