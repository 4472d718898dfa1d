"""The disk tier's folder: whose it is, which one is refused, how much of the disk it takes."""

from pathlib import Path

import pytest

from common.errors import StartupError
from kvstore_svc.tiers.disk_folder import DiskUnavailable, default_capacity
from tests.unit.kvstore_svc.tiers.disk_rig import open_tier


@pytest.mark.parametrize(
    ("free_bytes", "own_bytes", "capacity_bytes"),
    [
        (200 << 30, 0, 64 << 30),
        (10 << 30, 0, 5 << 30),
        (10 << 30, 2 << 30, 6 << 30),
        (1 << 30, 8 << 30, 8 << 30),
        (0, 5, 5),
        (0, 0, 0),
    ],
)
def test_a_default_capacity_is_half_of_the_room_and_never_less_than_what_is_there(
    free_bytes: int, own_bytes: int, capacity_bytes: int
) -> None:
    assert default_capacity(free_bytes, own_bytes) == capacity_bytes


async def test_a_second_store_on_the_folder_is_refused(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)

    with pytest.raises(StartupError, match=r"another block store uses it \(here\)"):
        open_tier(tmp_path)

    await tier.close()
    await open_tier(tmp_path).close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("octavo block store, disk format 2\n", "written by a newer version .disk format 2, this one knows 1"),
        ("a diary", "it is no folder of a block store"),
    ],
)
async def test_a_folder_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "format").write_text(text)

    with pytest.raises(StartupError, match=message):
        open_tier(tmp_path)

    assert (tmp_path / "format").read_text() == text


async def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(DiskUnavailable, match="file/kv: Not a directory"):
        open_tier(tmp_path / "file" / "kv")


async def test_files_that_are_no_segments_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "segment-x.kv").write_text("mine")
    (tmp_path / "segment-00000001-100.kv").write_text("mine")
    tier = open_tier(tmp_path)
    await tier.clear(None)
    await tier.close()

    assert (tmp_path / "segment-x.kv").read_text() == (tmp_path / "segment-00000001-100.kv").read_text() == "mine"
