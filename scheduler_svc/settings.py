"""Settings of scheduler_svc. Knows names, ranges and defaults; starts nothing."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from common.rpc.security import ServerSecurity
from common.settings import ServiceSettings, settings_config


class SchedulerSettings(ServiceSettings):
    """What scheduler_svc can be told, by flag or by OCTAVO_SCHEDULER_*."""

    model_config = settings_config("OCTAVO_SCHEDULER_", "scheduler_svc")

    listen: str = Field("127.0.0.1:50051", description="host:port or unix:/path of the public API")
    edge_processes: int = Field(
        0,
        ge=0,
        le=64,
        description="processes that serve the public API beside the engine's, one on a unix socket; "
        "0: the engine's process serves it",
    )
    executors: list[str] = Field(default_factory=list, description="addresses of executor_svc processes")
    kvstore: str = Field("", description="address of kvstore_svc; empty: none")
    executor_token: SecretStr = Field(SecretStr(""), description="bearer token that executors ask for; empty: none")
    executor_tls_ca: Path | None = Field(None, description="PEM file; set: executors are reached by TLS of this authority")
    kvstore_token: SecretStr = Field(SecretStr(""), description="bearer token that the block store asks for; empty: none")
    kvstore_tls_ca: Path | None = Field(None, description="PEM file; set: the block store is reached by TLS of this authority")
    executor_transport: Literal["auto", "grpc"] = Field(
        "auto", description="how plans reach executors; auto: by a socket of their own where both are on one host"
    )
    model: Path | None = Field(None, description="prepared model folder: tokenizer and chat template; not set: token ids only")
    model_name: str = Field("", description="models/{name} that clients ask for; empty: what the executors call it")

    token: SecretStr = Field(SecretStr(""), description="bearer token that callers must send; empty: none")
    admin_token: SecretStr = Field(SecretStr(""), description="bearer token for AdminService; empty: token is good for it")
    tls_cert: Path | None = Field(None, description="PEM file of the server's certificate")
    tls_key: Path | None = Field(None, description="PEM file of the certificate's key")
    tls_client_ca: Path | None = Field(None, description="PEM file; set: callers need a certificate of this authority")
    insecure: bool = Field(False, description="listen beyond this host without TLS and token")
    max_message_bytes: int = Field(16 << 20, ge=1 << 16, description="longest message of the public API")

    max_waiting_requests: int = Field(1024, ge=1, description="bound of each executor's queue")
    max_waiting_tokens: int = Field(1 << 20, ge=1, description="bound of each executor's queue, in prompt tokens")
    policy: Literal["fair", "fcfs", "priority"] = Field(
        "fair", description="who goes first: fair shares of tenants in service classes, first come first served, strict priority"
    )
    tenants: Path | None = Field(None, description="TOML file of tenants: weights, quotas, rates, tokens; not set: all are equal")
    max_wait_s: float = Field(
        0.0, ge=0, description="a request that is expected to wait longer for a place in the batch is refused; 0: none is"
    )
    max_chunk_tokens: int = Field(0, ge=0, description="most prompt tokens of one sequence in one step; 0: as many as a step has")
    prefix_caching: bool = Field(True, description="reuse computed blocks for later requests with the same beginning")
    cache_salt: SecretStr = Field(SecretStr(""), description="mixed into every block key; servers that share a store share it")
    run_ahead: int = Field(8, ge=1, le=32, description="most steps that may be under way at one executor")

    record: Path | None = Field(
        None, description="folder for recordings of what the scheduler was told and decided; no text; not set: none"
    )
    record_segment_bytes: int = Field(64 << 20, ge=1 << 16, description="bytes of one file of a recording")
    record_max_bytes: int = Field(4 << 30, ge=1 << 16, description="bytes of all recordings of a run; then they end")

    prewarm_share: float = Field(
        0.5, ge=0, le=1, description="share of the store's shared memory for blocks of turns that are expected soon; 0: none"
    )

    executor_wait_s: float = Field(2.0, ge=0, description="how long a new request waits for an executor to be connected")
    executor_lost_timeout_s: float = Field(30.0, ge=0, description="how long running requests wait for a lost executor")
    step_timeout_s: float = Field(300.0, gt=0, description="an executor that has no result of a step by then is lost")
    store_lookup_timeout_s: float = Field(0.05, gt=0, description="longest look-up in the block store, then it is a miss")
    store_load_timeout_s: float = Field(30.0, gt=0, description="longest load of blocks; what does not pay is cut earlier")

    @field_validator("executors")
    @classmethod
    def _named_once(cls, executors: list[str]) -> list[str]:
        # Two sessions with one executor would end each other again and again.
        if len(set(executors)) < len(executors):
            raise ValueError("names an executor twice")
        return executors

    def to_json(self) -> bytes:
        """Everything, secrets in clear, for an edge process over its private socket."""
        values = self.model_dump(mode="json")
        secrets = {name: value.get_secret_value() for name, value in self if isinstance(value, SecretStr)}
        return json.dumps({**values, **secrets}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "SchedulerSettings":
        """What to_json wrote."""
        return cls.model_validate(json.loads(data))

    def security(self, tokens_of_tenants: Iterable[str] = ()) -> ServerSecurity:
        """What callers of the public API must show.

        Args:
            tokens_of_tenants: SHA-256 of each, hexadecimal.
        """
        return ServerSecurity(
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_client_ca=self.tls_client_ca,
            token=self.token.get_secret_value(),
            admin_token=self.admin_token.get_secret_value(),
            insecure=self.insecure,
            other_tokens=frozenset(tokens_of_tenants),
        )
