"""Prometheus metrics of the block store: what GetStats says, for scrapers. Knows counters, not how they came about."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import REGISTRY, Collector

from common.errors import StartupError
from common.rpc.address import Address
from kvstore_svc.tiers.base import TierCounts
from kvstore_svc.tiers.stack import TierStack

_GAUGES = {
    "capacity_bytes": "Room for blocks",
    "used_bytes": "Room taken by blocks",
    "num_blocks": "Readable blocks",
}
_COUNTERS = {
    "num_hits": "Blocks asked for and found",
    "num_misses": "Blocks asked for and not found",
    "num_evictions": "Blocks dropped for room",
    "num_writes": "Blocks committed",
    "num_bad": "Blocks that were not what they were kept as, found by the tier itself",
}
_READ_COUNTERS = {
    "num_verify_failures": "Blocks that were found and had the wrong bytes",
    "num_timeouts": "Readers who waited too long for the next block",
    "read_bytes": "Bytes read",
}


class TierCollector(Collector):
    """Reads the tiers' counters when it is asked; plain numbers only, because scrapes come on another thread."""

    def __init__(self, tiers: TierStack):
        self._tiers = tiers

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """All metrics, by tier where that makes sense."""
        by_tier: dict[str, TierCounts] = {self._tiers.shm.name: self._tiers.shm.counts()}
        by_tier |= {tier.name: tier.counts() for tier in self._tiers.lower}
        for field, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"octavo_kvstore_{field.removeprefix('num_')}", text, labels=["tier"])
            for name, counts in by_tier.items():
                gauge.add_metric([name], getattr(counts, field))
            yield gauge
        for field, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"octavo_kvstore_{field.removeprefix('num_')}", text, labels=["tier"])
            for name, counts in by_tier.items():
                counter.add_metric([name], getattr(counts, field))
            yield counter
        is_up = GaugeMetricFamily("octavo_kvstore_tier_up", "1: the tier is in use; 0: it is left alone", labels=["tier"])
        for name, counts in by_tier.items():
            is_up.add_metric([name], not counts.unavailable_reason)
        yield is_up
        for field, text in _READ_COUNTERS.items():
            counter = CounterMetricFamily(f"octavo_kvstore_{field.removeprefix('num_')}", text, labels=["tier"])
            for lane in self._tiers.lanes:
                counter.add_metric([lane.tier.name], getattr(lane.meter, field))
            yield counter
        seconds = CounterMetricFamily("octavo_kvstore_read_seconds", "With at least one read under way", labels=["tier"])
        latency = GaugeMetricFamily("octavo_kvstore_read_latency_seconds", "Of one read, lately", labels=["tier"])
        for lane in self._tiers.lanes:
            seconds.add_metric([lane.tier.name], lane.meter.read_s)
            latency.add_metric([lane.tier.name], lane.meter.latency_s)
        yield seconds
        yield latency
        yield GaugeMetricFamily(
            "octavo_kvstore_largest_free_run_bytes",
            "Room in one piece in shared memory",
            self._tiers.shm.places.largest_free_run_bytes,
        )
        store = self._tiers.shm.store.counts
        yield CounterMetricFamily(
            "octavo_kvstore_checksum_mismatches", "Blocks whose bytes were not the right ones", store.num_checksum_mismatches
        )
        yield CounterMetricFamily(
            "octavo_kvstore_fenced_sessions", "Sessions that were silent too long", store.num_fenced_sessions
        )


def serve_metrics(listen: str, tiers: TierStack, registry: CollectorRegistry = REGISTRY) -> None:
    """Serves them over HTTP until the process ends.

    Args:
        listen: host:port; empty: nothing is served.
        tiers: whose counters.
        registry: to which they are added.

    Raises:
        StartupError: the address cannot be bound.
    """
    if not listen:
        return
    host, _, port = Address.parse(listen).target.rpartition(":")
    registry.register(TierCollector(tiers))
    try:
        start_http_server(int(port), host.strip("[]"), registry)
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot serve metrics on {listen}: {error}") from error
