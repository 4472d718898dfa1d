"""What the engine can be told. Plain data; the settings say what each is for."""

from dataclasses import dataclass

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
