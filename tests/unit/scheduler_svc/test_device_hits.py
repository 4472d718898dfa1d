"""The store hears of blocks that are used on a device: each once, and never in the path of a request."""

from common.ids import BlockKey
from scheduler_svc.device_hits import DeviceHits
from tests.unit.scheduler_svc.scripted_executor import ScriptedStore


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(32, "big")) for number in numbers]


async def test_each_block_is_told_once() -> None:
    store = ScriptedStore()
    hits = DeviceHits(store)
    for chain in ((1, 2), (1, 2), (1, 2, 3), ()):
        hits.note(keys(*chain))

    await hits.settle()

    assert store.used == [keys(1, 2), keys(3)]


async def test_nothing_is_told_before_the_caller_waits_for_something() -> None:
    store = ScriptedStore()
    hits = DeviceHits(store)

    hits.note(keys(1))

    assert store.used == []
    await hits.settle()
    hits.note(keys(4))
    await hits.settle()
    assert store.used == [keys(1), keys(4)]
