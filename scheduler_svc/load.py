"""The load of a moment as octavo.scheduler.v1.Load. Reads the engine; changes nothing."""

from collections.abc import Iterable

from octavo.kvstore.v1 import kv_store_service_pb2 as kvstore_pb
from octavo.scheduler.v1 import admin_service_pb2 as pb
from scheduler_svc.core.plan import SchedulerStats
from scheduler_svc.driver import ExecutorDriver
from scheduler_svc.engine import Engine


def load_message(engine: Engine, tiers: Iterable[pb.TierLoad], uptime_s: float) -> pb.Load:
    """Counters since start and gauges of now."""
    stats = [(driver, driver.stats()) for driver in engine.drivers]
    counters = engine.counters
    return pb.Load(
        uptime_s=uptime_s,
        num_waiting_requests=sum(s.num_waiting_requests for _, s in stats),
        num_waiting_tokens=sum(s.num_waiting_tokens for _, s in stats),
        num_running_requests=sum(s.num_running_requests for _, s in stats),
        num_finished_requests=counters.num_finished_requests,
        num_failed_requests=counters.num_failed_requests,
        num_cancelled_requests=counters.num_cancelled_requests,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_output_tokens=counters.num_output_tokens,
        num_cached_tokens=counters.num_cached_tokens,
        num_preemptions=sum(s.num_preemptions for _, s in stats),
        num_discarded_tokens=sum(s.num_discarded_tokens for _, s in stats),
        executors=[_executor_load(driver, s) for driver, s in stats],
        tiers=tiers,
        degraded=dict(engine.degraded.counts),
        cached_tokens_by_tier=counters.cached_tokens_by_tier,
    )


def tier_loads(engine: Engine, stats: kvstore_pb.GetStatsResponse | None) -> list[pb.TierLoad]:
    """Load of the block store by tier; empty when it does not answer."""
    return [
        pb.TierLoad(
            tier=_tier_name(tier),
            capacity_bytes=tier.capacity_bytes,
            used_bytes=tier.used_bytes,
            num_blocks=tier.num_blocks,
            num_hits=tier.num_hits,
            num_misses=tier.num_misses,
            num_evictions=tier.num_evictions,
            unavailable_reason=tier.unavailable_reason,
            num_verify_failures=tier.num_verify_failures,
            num_timeouts=tier.num_timeouts,
            read_bytes=tier.read_bytes,
            read_s=tier.read_s,
            read_latency_s=tier.read_latency_s,
            load_bytes_per_s=engine.load_bytes_per_s(_tier_name(tier)),
            largest_free_run_bytes=tier.largest_free_run_bytes,
        )
        for tier in (stats.tiers if stats is not None else ())
    ]


def _tier_name(tier: kvstore_pb.TierStats) -> str:
    return kvstore_pb.Tier.Name(tier.tier).removeprefix("TIER_").lower()


def _executor_load(driver: ExecutorDriver, stats: SchedulerStats) -> pb.ExecutorLoad:
    totals = driver.totals
    return pb.ExecutorLoad(
        executor_id=driver.info.executor_id if driver.info is not None else driver.address,
        connected=driver.is_connected,
        num_running_sequences=stats.num_running_sequences,
        num_blocks=stats.num_blocks,
        num_used_blocks=stats.num_used_blocks,
        num_shared_blocks=stats.num_shared_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_free_blocks=stats.num_free_blocks,
        largest_free_run=stats.largest_free_run,
        mean_run_length=stats.mean_run_length,
        kv_waste_ratio=stats.kv_waste_ratio,
        num_steps=totals.num_steps,
        step_s=totals.busy_s / totals.num_steps if totals.num_steps else 0.0,
        idle_ratio=totals.idle_s / (totals.idle_s + totals.busy_s) if totals.num_steps else 0.0,
        num_preemptions=stats.num_preemptions,
        kv_dtype=driver.info.kv_dtype if driver.info is not None else "",
    )
