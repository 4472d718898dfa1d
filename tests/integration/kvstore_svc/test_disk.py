"""The disk tier of a real store: what was used twice is there after a restart, whatever happened in between."""

import os
import resource
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from common.ids import BlockKey
from common.patience import Patience
from common.rpc.channel import ChannelSecurity
from executor_svc.clients.kvstore_session import SessionSpec, StoreSession
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.store_process import FINGERPRINT, MIB, BufferClient, StoreProcess, key, wait_until
from tests.integration.kvstore_svc.test_startup import run_store

DISK = ("--disk-capacity-bytes", str(16 * MIB))


def data_of(number: int) -> memoryview:
    return memoryview(bytearray(number.to_bytes(2, "big") * 2048))


def save(client: BufferClient, *numbers: int) -> None:
    report = client.save([(key(number), data_of(number)) for number in numbers])
    assert report.num_failed == 0, report.reason


def loaded(client: BufferClient, *numbers: int) -> list[bool]:
    """Whether each comes back; its bytes are checked."""
    found = []
    for number in numbers:
        into = memoryview(bytearray(4096))
        is_there = client.load([(key(number), into)], Patience(10.0)).num_loaded == 1
        assert not is_there or into == data_of(number)
        found.append(is_there)
    return found


def look_up(store: StoreProcess, *numbers: int) -> list["pb.Tier.ValueType"]:
    keys: list[BlockKey] = [key(number) for number in numbers]
    return list(store.stub.LookupBlocks(pb.LookupBlocksRequest(keys=keys), timeout=10).tiers)


def disk_stats(store: StoreProcess) -> pb.TierStats:
    return next(tier for tier in store.stats().tiers if tier.tier == pb.TIER_DISK)


def restart(store: StoreProcess) -> None:
    assert store.stop() == 0
    store.restart()
    store.wait_ready()


def flip_byte_of(store: StoreProcess, number: int) -> None:
    """Changes one byte of a block in the segment files."""
    wanted = bytes(data_of(number))
    for path in store.disk_dir.glob("*.kv"):
        at = path.read_bytes().find(wanted)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 99)
                file.write(bytes([wanted[99] ^ 1]))
            return
    raise AssertionError(f"block {number} is in no segment")


def test_blocks_that_were_used_twice_are_there_after_a_restart(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store(*DISK)
    with closing(store.client()) as client:
        save(client, 1, 2, 3, 4)
        assert look_up(store, 1, 2, 3) == [pb.TIER_SHM] * 3

    restart(store)

    assert look_up(store, 1, 2, 3) == [pb.TIER_DISK] * 3
    with closing(store.client()) as client:
        assert loaded(client, 1, 2, 3, 4) == [True, True, True, False]
    assert look_up(store, 1) == [pb.TIER_SHM]
    assert disk_stats(store).num_hits == 3


def test_a_client_that_holds_a_chain_on_its_device_uses_it(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store(*DISK)
    with closing(store.client()) as client:
        save(client, 1, 2)
        store.stub.LookupBlocks(pb.LookupBlocksRequest(keys=[key(9)], held_keys=[key(1), key(2)]), timeout=10)

    wait_until(lambda: disk_stats(store).num_blocks == 2)


def test_a_flipped_bit_on_disk_is_a_miss_and_is_counted(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store(*DISK)
    with closing(store.client()) as client:
        save(client, 1, 2)
        look_up(store, 1, 2)
    restart(store)
    flip_byte_of(store, 1)

    with closing(store.client()) as client:
        assert loaded(client, 1, 2) == [False, True]
        assert store.stats().num_checksum_mismatches == 1
        assert look_up(store, 1) == []
        save(client, 1)
        assert loaded(client, 1) == [True]


def test_a_second_store_on_the_folder_is_refused(start_store: Callable[..., StoreProcess], tmp_path: Path) -> None:
    store = start_store(*DISK)

    second = run_store(
        "--listen",
        f"unix:{tmp_path}/other.sock",
        "--shm-socket",
        f"{tmp_path}/other.shm",
        "--disk-dir",
        str(store.disk_dir),
        *DISK,
    )

    assert second.returncode == 1
    assert f"--disk-dir {store.disk_dir}: another block store uses it ({store.address.target})" in second.stderr
    assert "Traceback" not in second.stderr
    assert look_up(store, 1) == []


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "format").write_text("octavo block store, disk format 9\n")

    refused = run_store(
        "--listen", f"unix:{tmp_path}/kv.sock", "--shm-socket", f"{tmp_path}/kv.shm", "--disk-dir", f"{tmp_path}/disk", *DISK
    )

    assert refused.returncode == 1
    assert "written by a newer version (disk format 9, this one knows 1)" in refused.stderr


@pytest.mark.parametrize("obstacle", ["read-only", "a file in its place"])
def test_without_a_usable_folder_the_store_serves_without_the_tier(
    start_store: Callable[..., StoreProcess], tmp_path: Path, obstacle: str
) -> None:
    folder = tmp_path / "disk"
    if obstacle == "read-only":
        folder = Path("/proc/self/disk")  # read-only for root too
    else:
        folder.write_text("")

    store = start_store(*DISK, "--disk-dir", str(folder))

    assert str(folder) in disk_stats(store).unavailable_reason
    assert store.stats().degraded["kvstore_disk"] == 1
    assert "degraded: kvstore_disk: no disk tier" in store.log
    with closing(store.client()) as client:
        save(client, 1, 2)
        assert look_up(store, 1, 2) == [pb.TIER_SHM] * 2
        assert loaded(client, 1, 2) == [True, True]


def test_a_full_disk_costs_nothing_but_the_tier(start_store: Callable[..., StoreProcess]) -> None:
    """The limit on file sizes stands for a full disk: no segment can be made."""
    store = start_store(*DISK)
    resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))
    with closing(store.client()) as client:
        save(client, 1, 2)
        look_up(store, 1, 2)

        wait_until(lambda: store.stats().degraded["kvstore_disk_full"] >= 1)

        assert disk_stats(store).num_blocks == 0
        assert loaded(client, 1, 2) == [True, True]
    assert store.stop() == 0


def test_what_waits_for_the_disk_is_written_before_the_store_ends(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store(*DISK, "--disk-admission-touches", "1")
    with closing(store.client()) as client:
        save(client, *range(200))  # of about 240 that may wait

    restart(store)

    assert look_up(store, *range(200)) == [pb.TIER_DISK] * 200


def test_a_disk_that_cannot_be_read_costs_misses_and_nothing_else(start_store: Callable[..., StoreProcess]) -> None:
    """Reads that end too early stand for sectors that are gone."""
    store = start_store(*DISK)
    with closing(store.client()) as client:
        save(client, *range(1, 9))
        look_up(store, *range(1, 9))
    restart(store)
    for path in store.disk_dir.glob("*.kv"):
        os.truncate(path, 0)

    with closing(store.client()) as client:
        assert loaded(client, *range(1, 9)) == [False] * 8
        assert store.stats().degraded["kvstore_disk"] >= 1
        save(client, *range(1, 9))
        assert loaded(client, *range(1, 9)) == [True] * 8
        # The disk may take these again, and holds them until it has; and nobody waits for the release of a load.
        wait_until(lambda: store.stats().tiers[0].num_leased_blocks == 0)
    assert store.stop() == 0


def test_a_store_that_is_killed_between_reserve_and_commit_leaves_nothing_of_the_block(
    start_store: Callable[..., StoreProcess],
) -> None:
    store = start_store(*DISK, "--disk-admission-touches", "1")
    with closing(store.client()) as client:
        save(client, 1)
        wait_until(lambda: disk_stats(store).num_blocks == 1)
        session = StoreSession.open(store.channel, SessionSpec("raw", FINGERPRINT, 4096, "shm", ChannelSecurity()), 10.0)
        request = pb.ReserveBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=[key(2), key(3)])
        assert len(session.stub.ReserveBlocks(request, timeout=10).results) == 2
        store.kill()
        session.abandon()
        store.restart()
        store.wait_ready()
        store.reconnect()

        assert look_up(store, 1) == [pb.TIER_DISK]
        assert (look_up(store, 2), look_up(store, 3)) == ([], [])
        assert store.stats().tiers[0].used_bytes == 0
        wait_until(lambda: client.save([(key(2), data_of(2))]).num_written == 1)
        assert loaded(client, 1, 2, 3) == [True, True, False]


def test_a_full_index_leaves_blocks_that_are_found_by_their_headers(start_store: Callable[..., StoreProcess]) -> None:
    """Room for segments, none for the index: blocks are kept, and not called durable."""
    store = start_store(*DISK)
    with closing(store.client()) as client:
        save(client, 1)
        look_up(store, 1)
        wait_until(lambda: disk_stats(store).num_blocks == 1)
        resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE, (1, 1))
        save(client, 2)
        look_up(store, 2)
        wait_until(lambda: store.stats().degraded["kvstore_disk"] + store.stats().degraded["kvstore_write_down"] >= 1)
    store.kill()
    store.restart()
    store.wait_ready()

    with closing(store.client()) as client:
        assert loaded(client, 1)[0] in (True, False)
        assert store.stats().num_checksum_mismatches == 0


def test_more_than_fits_goes_round(start_store: Callable[..., StoreProcess]) -> None:
    """Ten times what memory and disk hold; no file grows beyond the capacity and all that is there is right."""
    store = start_store(
        "--disk-capacity-bytes", str(2 * MIB), "--disk-segment-bytes", str(256 << 10), "--disk-admission-touches", "1"
    )
    with closing(store.client()) as client:
        for first in range(0, 2000, 100):
            save(client, *range(first, first + 100))
        wait_until(lambda: disk_stats(store).num_evictions > 0)
        found = loaded(client, *range(1000, 2000))
    assert sum(path.stat().st_size for path in store.disk_dir.glob("*.kv")) <= 2 * MIB
    assert any(found)
    assert store.stats().num_checksum_mismatches == 0
