"""Channels to other services, with the options that all of Octavo uses. Knows addresses and credentials, not what is called."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from common.errors import StartupError
from common.rpc.address import Address

MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]
# Only UNAVAILABLE is retried, and only before the first message of an answer (AIP-194).
_RETRY = {
    "methodConfig": [
        {
            "name": [
                {"service": "octavo.scheduler.v1.InferenceService"},
                {"service": "octavo.scheduler.v1.ModelService"},
            ],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}


@dataclass(frozen=True)
class ChannelSecurity:
    """How to reach a protected server.

    Attributes:
        tls_ca: PEM file of the authority to trust; None for a plain channel.
        tls_cert, tls_key: PEM files of this side's certificate, for servers that ask for one.
        token: sent as "authorization: Bearer <token>" by the caller of each method; see metadata().
    """

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token: str = field(default="", repr=False)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata to send with every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for a secure channel; None for a plain one.

        Raises:
            StartupError: a file cannot be read.
        """
        if self.tls_ca is None:
            return None
        try:
            key = self.tls_key.read_bytes() if self.tls_key else None
            cert = self.tls_cert.read_bytes() if self.tls_cert else None
            return grpc.ssl_channel_credentials(self.tls_ca.read_bytes(), key, cert)
        except OSError as error:
            raise StartupError(f"cannot read TLS files: {error}") from error


def aio_channel(address: Address, security: ChannelSecurity | None = None) -> grpc.aio.Channel:
    """A channel for asyncio code."""
    options = [*_OPTIONS, ("grpc.service_config", json.dumps(_RETRY)), ("grpc.enable_retries", 1)]
    credentials = security.credentials() if security else None
    if credentials is not None:
        return grpc.aio.secure_channel(address.target, credentials, options)
    return grpc.aio.insecure_channel(address.target, options)


def sync_channel(address: Address, security: ChannelSecurity | None = None) -> grpc.Channel:
    """A channel for threads."""
    options = [*_OPTIONS, ("grpc.service_config", json.dumps(_RETRY)), ("grpc.enable_retries", 1)]
    credentials = security.credentials() if security else None
    if credentials is not None:
        return grpc.secure_channel(address.target, credentials, options)
    return grpc.insecure_channel(address.target, options)
