"""What the engine can be told. Plain data; the settings say what each is for."""

from dataclasses import dataclass

from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.tenants import EQUALS, Tenants


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """See SchedulerSettings for the meaning of each."""

    max_chunk_tokens: int = 0
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    prefix_caching: bool = True
    run_ahead: int = 8
    executor_wait_s: float = 2.0
    executor_lost_timeout_s: float = 30.0
    step_timeout_s: float = 300.0
    store_lookup_timeout_s: float = 0.05
    store_load_timeout_s: float = 30.0
    policy: str = "fair"
    tenants: Tenants = EQUALS
    max_wait_s: float = 0.0

    def limits_of(self, info: pb.ExecutorInfo) -> SchedulerConfig:
        """What the core of an executor has to keep to."""
        return SchedulerConfig(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_chunk_tokens=min(self.max_chunk_tokens or info.max_num_batched_tokens, info.max_num_batched_tokens),
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            prefix_caching=self.prefix_caching,
            save_blocks=bool(info.kv_transport) and self.prefix_caching,
            max_wait_s=self.max_wait_s or None,
            tenants=self.tenants,
        )
