"""Tiers that were slow once get another chance: lower ones by a probe, shared memory by the next request."""

from common.clock import ManualClock
from common.ids import BlockKey
from scheduler_svc.core.load_policy import LoadPolicy
from scheduler_svc.core.prefill_time import PrefillTime
from scheduler_svc.core.step_time import StepTimeModel
from scheduler_svc.probes import Probes
from tests.unit.scheduler_svc.scripted_executor import ScriptedStore, settle

KEYS = [BlockKey(bytes([i]) * 32) for i in range(12)]


async def test_a_lower_tier_is_read_in_the_background() -> None:
    policy, store = LoadPolicy(16, PrefillTime(StepTimeModel(), 512)), ScriptedStore(["disk"] * 12)
    policy.speed("disk").note(10, 1.0, 10.0)
    probes = Probes(store, b"f" * 32, 4096, policy, ManualClock())

    probes.consider("disk", KEYS)
    await settle()

    assert store.prefetched == [KEYS[:8]]
    assert policy.speed("disk").seconds(10) < 10.0
    probes.close()


async def test_shared_memory_is_tried_again_by_a_request_and_not_measured_by_how_the_store_answers() -> None:
    policy, store = LoadPolicy(16, PrefillTime(StepTimeModel(), 512)), ScriptedStore(["shm"] * 12)
    policy.speed("shm").note(10, 1.0, 10.0)
    probes = Probes(store, b"f" * 32, 4096, policy, ManualClock())

    probes.consider("shm", KEYS)
    await settle()

    assert not store.prefetched
    assert not policy.speed("shm").is_known
    probes.close()
