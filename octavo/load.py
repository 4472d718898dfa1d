"""What operators see of a server: its parts and its load. Plain, frozen values; fields are those of admin_service.proto."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierLoad:
    """One tier of the block store.

    Attributes:
        num_verify_failures: blocks that were found and had the wrong bytes.
        num_timeouts: readers who waited too long for the next block.
        read_bytes: by the store, from a lower tier.
        read_s: time with at least one such read under way.
        read_latency_s: of one read, lately.
        load_bytes_per_s: all the way to a device, as executors measured it lately; 0: not yet.
        largest_free_run_bytes: room in one piece; of shared memory only.
        unavailable_reason: why it is left alone for the moment; empty: it is not.
    """

    tier: str
    capacity_bytes: int
    used_bytes: int
    num_blocks: int
    num_hits: int
    num_misses: int
    num_evictions: int
    num_verify_failures: int
    num_timeouts: int
    read_bytes: int
    read_s: float
    read_latency_s: float
    load_bytes_per_s: float
    largest_free_run_bytes: int
    unavailable_reason: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorLoad:
    """Load of one executor.

    Attributes:
        num_used_blocks: in use by a running sequence.
        num_shared_blocks: used by more than one.
        num_cached_blocks: not in use, still good for prefix hits.
        num_free_blocks: neither.
        kv_waste_ratio: slots of used blocks that hold no token, as a share of all slots of used blocks.
        step_s: length of a step, lately.
        idle_ratio: share of the time without a step.
        kv_dtype: of keys and values in the device pool.
    """

    executor_id: str
    connected: bool
    num_running_sequences: int
    num_blocks: int
    num_used_blocks: int
    num_shared_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    largest_free_run: int
    mean_run_length: float
    kv_waste_ratio: float
    num_steps: int
    step_s: float
    idle_ratio: float
    num_preemptions: int
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class Load:
    """Gauges of now, and counters since the start of the server.

    Attributes:
        degraded: degraded paths by name, and how often each was taken.
        cached_tokens_by_tier: counters.
    """

    uptime_s: float
    num_waiting_requests: int
    num_waiting_tokens: int
    num_running_requests: int
    num_finished_requests: int
    num_failed_requests: int
    num_cancelled_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_discarded_tokens: int
    executors: tuple[ExecutorLoad, ...]
    tiers: tuple[TierLoad, ...]
    degraded: Mapping[str, int]
    cached_tokens_by_tier: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """One executor as the scheduler sees it.

    Attributes:
        leaving: it gets no new requests and leaves when those that it has are through.
        num_requests: that are queued or run there.
        problem: why it is not connected; empty: it is.
    """

    executor_id: str
    address: str
    connected: bool
    model: str
    backend: str
    dtype: str
    num_blocks: int
    block_size: int
    block_bytes: int
    memory_bytes: Mapping[str, int]
    kv_transport: str
    kv_transport_reason: str
    kv_dtype: str
    leaving: bool = False
    num_requests: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class KvStoreStatus:
    """The block store as the scheduler sees it; reason says why it is not connected."""

    address: str
    connected: bool
    reason: str
    tiers: tuple[TierLoad, ...]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Version, settings (secrets masked) and peers. kvstore is None when the server has no block store."""

    version: str
    uptime_s: float
    settings: Mapping[str, str]
    executors: tuple[ExecutorStatus, ...]
    kvstore: KvStoreStatus | None


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a cache forgot."""

    num_device_blocks: int
    num_store_blocks: int
