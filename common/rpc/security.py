"""Who may call: TLS for servers and channels, bearer tokens for callers. Knows files and tokens, not what a call does."""

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from common.errors import PermissionDenied, StartupError, Unauthenticated
from common.rpc.address import Address


@dataclass(frozen=True)
class ServerSecurity:
    """What a server asks of its callers.

    Attributes:
        tls_cert, tls_key: PEM files; both or none.
        tls_client_ca: PEM file; set: callers must show a certificate of this authority.
        token: callers of the public API must send "authorization: Bearer <token>"; empty: nobody has to.
        admin_token: the same for the calls of operators; empty: token is good for them too.
        other_tokens: SHA-256, hexadecimal, of tokens that are good for the public API beside token.
        insecure: allow an address beyond this host without TLS and token.
    """

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    token: str = field(default="", repr=False)
    admin_token: str = field(default="", repr=False)
    insecure: bool = False
    other_tokens: frozenset[str] = field(default=frozenset(), repr=False)

    def check_listen(self, address: Address) -> None:
        """Refuses to open the server to the network without TLS and a token.

        Raises:
            StartupError: the address is reachable from other hosts and the server is not protected.
        """
        if address.is_local or self.insecure:
            return
        protected = self.tls_cert is not None and (self.token or self.other_tokens or self.tls_client_ca is not None)
        if not protected:
            raise StartupError(
                f"refusing to listen on {address.target}: it is reachable from other hosts; set --tls-cert, --tls-key and "
                "--token (or --tls-client-ca), or pass --insecure if the network is yours alone"
            )

    def credentials(self) -> grpc.ServerCredentials | None:
        """Credentials for add_secure_port; None for a plain port.

        Raises:
            StartupError: a file is missing, or cannot be read.
        """
        if self.tls_cert is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise StartupError("TLS needs both --tls-cert and --tls-key")
        try:
            ca = self.tls_client_ca.read_bytes() if self.tls_client_ca else None
            pair = (self.tls_key.read_bytes(), self.tls_cert.read_bytes())
        except OSError as error:
            raise StartupError(f"cannot read TLS files: {error}") from error
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)

    def check_call(self, authorization: str | None, *, admin: bool) -> None:
        """Compares a caller's token in constant time.

        Args:
            authorization: value of the call's "authorization" metadata.
            admin: whether the call is an operator's.

        Raises:
            Unauthenticated: a token is needed and there is none, or an unknown one.
            PermissionDenied: the token is good, but not for operators.
        """
        needed = (self.admin_token or self.token) if admin else self.token
        if not needed and not self.other_tokens:
            return
        scheme, _, token = (authorization or "").partition(" ")
        sent = token.encode() if scheme == "Bearer" else b""
        if any(hmac.compare_digest(sent, good.encode()) for good in (needed, self.admin_token) if good):
            return
        # A digest is looked up, not the token: how long that takes says nothing about other tokens.
        is_other = hashlib.sha256(sent).hexdigest() in self.other_tokens
        if is_other and not admin:
            return
        if admin and (is_other or (self.token and hmac.compare_digest(sent, self.token.encode()))):
            raise PermissionDenied("this call needs the admin token")
        raise Unauthenticated("authorization: send 'Bearer <token>' of this server")
