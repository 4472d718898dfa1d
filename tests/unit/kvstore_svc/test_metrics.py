"""What a scraper sees."""

from contextlib import closing

from prometheus_client import CollectorRegistry, generate_latest

from common.clock import ManualClock
from common.degraded import DegradedPaths
from common.ids import Epoch
from common.shm.slab import PAGE_BYTES
from kvstore_svc.metrics import TierCollector
from kvstore_svc.tiers.shm import ShmTier, create_slabs
from kvstore_svc.tiers.stack import TierStack
from tests.unit.kvstore_svc.tiers.memory_tier import MemoryTier


def test_counters_come_by_tier() -> None:
    epoch = Epoch(1)
    slabs = create_slabs(8 * PAGE_BYTES, 8 * PAGE_BYTES, epoch)
    with closing(ShmTier(slabs, epoch, session_ttl_s=10, quarantine_s=300)) as shm:
        registry = CollectorRegistry()
        tiers = TierStack(shm, [MemoryTier("disk")], clock=ManualClock(), degraded=DegradedPaths())
        registry.register(TierCollector(tiers))

        text = generate_latest(registry).decode()

    assert 'octavo_kvstore_capacity_bytes{tier="shm"} 24576.0' in text
    assert 'octavo_kvstore_hits_total{tier="disk"} 0.0' in text
    assert 'octavo_kvstore_tier_up{tier="disk"} 1.0' in text
    assert 'octavo_kvstore_bad_total{tier="disk"} 0.0' in text
    assert 'octavo_kvstore_read_bytes_total{tier="disk"} 0.0' in text
    assert 'octavo_kvstore_read_seconds_total{tier="disk"} 0.0' in text
    assert "octavo_kvstore_largest_free_run_bytes 24576.0" in text
    assert "octavo_kvstore_checksum_mismatches_total 0.0" in text
