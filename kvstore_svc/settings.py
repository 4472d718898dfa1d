"""What the block store can be told. Flags and OCTAVO_KVSTORE_* variables; nothing else configures it."""

import hashlib
import os
import tempfile
from pathlib import Path

from pydantic import Field, SecretStr, field_validator, model_validator

from common.rpc.address import Address
from common.rpc.security import ServerSecurity
from common.settings import ServiceSettings, settings_config
from common.shm.slab import MIN_SLAB_BYTES
from common.state_folder import kv_folder
from kvstore_svc.core.block_store import MAX_EVENTS
from kvstore_svc.tiers.fills import ReadLimits
from kvstore_svc.tiers.throttled import Throttle

MAX_SLABS = 4096
MIN_SEGMENT_BYTES = 64 << 10

# Of Redis: one block on its way, and one behind it, so that a connection need not wait for the event loop.
READS_PER_CONNECTION = 2


class KvStoreSettings(ServiceSettings):
    """Settings of kvstore_svc."""

    model_config = settings_config("OCTAVO_KVSTORE_", "python -m kvstore_svc")

    listen: str = Field("127.0.0.1:50071", description="host:port or unix:/path of the gRPC server")
    shm_socket: str = Field(
        "", description="path of the socket that hands out shared memory; empty: in a private folder below the temporary one"
    )
    allowed_uids: str = Field(
        "", description="numeric user ids, separated by commas, that may map the shared memory; empty: the user of this process"
    )
    capacity_bytes: int = Field(1 << 30, ge=MIN_SLAB_BYTES, description="shared memory for blocks")
    slab_bytes: int = Field(256 << 20, ge=MIN_SLAB_BYTES, description="shared memory comes in pieces of this size")
    session_ttl_s: float = Field(10.0, gt=0, description="a session that is silent for longer is fenced")
    heartbeat_s: float = Field(2.0, gt=0, description="how often clients give a sign of life")
    quarantine_s: float = Field(
        300.0, ge=0, description="memory that a silent but living process may still write is reported as lost after this time"
    )
    disk_dir: str = Field(
        "", description="folder of the disk tier, for this store alone; empty: of this address, below ~/.local/state/octavo/kv"
    )
    disk_capacity_bytes: int | None = Field(
        None,
        ge=0,
        description="room that the disk tier may take; 0: no disk tier; not set: 64 GiB, or half of what is free if less",
    )
    disk_segment_bytes: int = Field(256 << 20, ge=MIN_SEGMENT_BYTES, description="the disk tier grows in files of this size")
    disk_admission_touches: int = Field(
        2, ge=1, description="so many uses, writing it is one, make a block worth writing to disk"
    )
    disk_deadline_s: float = Field(
        0.05, gt=0, description="whoever got no block from the disk for so long goes without the rest of it"
    )
    redis_deadline_s: float = Field(0.2, gt=0, description="the same for Redis")
    throttle: list[str] = Field(
        default_factory=list, description="for tests: tier=bytes_per_s or tier=bytes_per_s:latency_s makes a lower tier slower"
    )
    max_events: int = Field(
        MAX_EVENTS, ge=1, le=1 << 24, description="changes that WatchEvents keeps; a reader further behind begins again"
    )
    redis_url: SecretStr = Field(
        SecretStr(""),
        description="redis://, rediss:// or unix:// URL of a Redis or Valkey server for blocks; empty: no such tier",
    )
    redis_connections: int = Field(6, ge=1, le=64, description="connections to Redis that carry blocks, one block at a time each")
    redis_ttl_s: int = Field(86_400, ge=1, description="a block that nobody has read for so long is forgotten by Redis")
    redis_timeout_s: float = Field(
        0.5, gt=0, le=60, description="longest connect, and longest transfer of a block, then it is a miss"
    )
    redis_lookup_timeout_s: float = Field(
        0.015, gt=0, le=60, description="longest look-up in Redis, then its blocks are not there"
    )
    redis_off_s: float = Field(5.0, gt=0, description="a Redis that fails again and again is left alone for so long")
    tls_cert: Path | None = Field(None, description="PEM file of the server's certificate")
    tls_key: Path | None = Field(None, description="PEM file of its key")
    tls_client_ca: Path | None = Field(None, description="PEM file of the authority whose certificates clients must show")
    token: SecretStr = Field(SecretStr(""), description="bearer token that callers must send; empty: none")
    insecure: bool = Field(False, description="listen beyond this host without TLS and token")

    @model_validator(mode="after")
    def _consistent(self) -> "KvStoreSettings":
        if self.heartbeat_s * 2 > self.session_ttl_s:
            raise ValueError(f"heartbeat-s {self.heartbeat_s} must be at most half of session-ttl-s {self.session_ttl_s}")
        if self.capacity_bytes // self.slab_bytes >= MAX_SLABS:
            raise ValueError(f"capacity-bytes / slab-bytes must be below {MAX_SLABS} slabs; raise slab-bytes")
        if any(not part.strip().isdigit() for part in self.allowed_uids.split(",") if part):
            raise ValueError(f"allowed-uids {self.allowed_uids!r}: expected numbers separated by commas")
        return self

    @field_validator("throttle")
    @classmethod
    def _throttles(cls, throttle: list[str]) -> list[str]:
        for text in throttle:
            Throttle.parse(text)
        return throttle

    def read_limits(self) -> dict[str, ReadLimits]:
        """How each lower tier is read."""
        return {
            "disk": ReadLimits(deadline_s=self.disk_deadline_s),
            "redis": ReadLimits(READS_PER_CONNECTION * self.redis_connections, self.redis_deadline_s),
        }

    def throttles(self) -> list[Throttle]:
        """Tiers that are made slower."""
        return [Throttle.parse(text) for text in self.throttle]

    def address(self) -> Address:
        """Where to listen.

        Raises:
            StartupError: listen is no address.
        """
        return Address.parse(self.listen)

    def shm_socket_path(self) -> Path:
        """Path of the file descriptor socket; by default different for every address."""
        if self.shm_socket:
            return Path(self.shm_socket)
        name = hashlib.blake2b(self.listen.encode(), digest_size=6).hexdigest()
        return Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}" / f"kvstore-{name}.shm"

    def disk_folder(self) -> Path:
        """Folder of the disk tier; by default different for every address."""
        return Path(self.disk_dir) if self.disk_dir else kv_folder(self.listen)

    def uids(self) -> frozenset[int]:
        """Users that may map the shared memory."""
        return frozenset(int(part) for part in self.allowed_uids.split(",") if part) or frozenset({os.getuid()})

    def security(self) -> ServerSecurity:
        """What callers must show."""
        return ServerSecurity(
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_client_ca=self.tls_client_ca,
            token=self.token.get_secret_value(),
            insecure=self.insecure,
        )
