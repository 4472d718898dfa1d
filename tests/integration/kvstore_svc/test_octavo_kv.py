"""`octavo kv` with a store that runs, and with a folder that no store has."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from common.block_hash import chain_keys, chain_salt, root_key
from octavo.cli.main import app
from tests.integration.kvstore_svc.store_process import FINGERPRINT, StoreProcess
from tests.integration.kvstore_svc.test_admin import persist
from tests.integration.kvstore_svc.test_disk import DISK, data_of, disk_stats, flip_byte_of, loaded, look_up, save


@pytest.fixture
def filled(start_store: Callable[..., StoreProcess]) -> StoreProcess:
    """Five blocks, three of them on disk."""
    store = start_store(*DISK)
    with closing(store.client()) as client:
        save(client, *range(5))
    assert persist(store, 0, 1, 2) == [True] * 3
    return store


def octavo_kv(store: StoreProcess, *arguments: str) -> Result:
    result = CliRunner().invoke(app, ["kv", *arguments, "--disk-dir", str(store.disk_dir)])
    assert "Traceback" not in result.output, result.output
    return result


def listed(store: StoreProcess) -> dict[str, int]:
    return {row["tier"]: row["num_blocks"] for row in json.loads(octavo_kv(store, "list", "--json").stdout)}


def test_it_finds_the_running_store_by_its_folder(filled: StoreProcess) -> None:
    assert listed(filled) == {"shm": 5, "disk": 3}
    table = octavo_kv(filled, "list").stdout
    assert FINGERPRINT.hex()[:16] in table and "4.0 KiB" in table


def test_without_a_store_one_is_started_for_the_folder_and_stopped(filled: StoreProcess) -> None:
    assert filled.stop() == 0

    assert listed(filled) == {"disk": 3}
    verified = octavo_kv(filled, "verify")

    assert (verified.exit_code, verified.stdout) == (0, "3 blocks, 12.0 KiB: 0 bad ones dropped\n")
    filled.restart()
    filled.wait_ready()
    assert disk_stats(filled).num_blocks == 3


def test_verify_drops_what_is_wrong_and_says_so_by_its_exit_status(filled: StoreProcess) -> None:
    flip_byte_of(filled, 1)

    verified = octavo_kv(filled, "verify")

    assert (verified.exit_code, verified.stdout) == (1, "3 blocks, 12.0 KiB: 1 bad ones dropped\n")
    assert disk_stats(filled).num_blocks == 2


def test_what_was_exported_can_be_imported_after_everything_was_dropped(filled: StoreProcess, tmp_path: Path) -> None:
    file = tmp_path / "blocks.kv"
    assert "5 blocks" in octavo_kv(filled, "export", str(file)).stdout
    assert octavo_kv(filled, "export", str(file)).exit_code == 2  # it is there already
    assert octavo_kv(filled, "drop", "--yes", "--layout", FINGERPRINT.hex()[:8]).exit_code == 0
    assert listed(filled) == {}

    imported = octavo_kv(filled, "import", str(file))

    assert imported.stdout == "5 blocks, 5 of them on disk; 0 had wrong bytes, 0 found no room\n"
    assert listed(filled) == {"shm": 5, "disk": 5}
    with closing(filled.client()) as client:
        assert loaded(client, *range(5)) == [True] * 5


def test_chosen_keys_are_exported(filled: StoreProcess, tmp_path: Path) -> None:
    keys = [word for number in (4, 1) for word in ("--key", number.to_bytes(32, "big").hex())]

    assert "2 blocks" in octavo_kv(filled, "export", str(tmp_path / "two.kv"), *keys).stdout

    bad = octavo_kv(filled, "export", str(tmp_path / "x.kv"), "--key", "12")
    assert bad.exit_code == 2
    assert "--key: '12' is no key: 64 hexadecimal digits" in bad.stderr


def test_the_blocks_of_a_prompt_are_exported(filled: StoreProcess, tmp_path: Path) -> None:
    """Three full blocks of four tokens and the rest; the store has the first two, under a salt."""
    keys = chain_keys(root_key(FINGERPRINT, chain_salt("", "mine")), range(14), 4)
    with closing(filled.client()) as client:
        assert client.save([(key, data_of(100 + i)) for i, key in enumerate(keys[:2])]).num_written == 2
    tokens = ("--tokens", ", ".join(map(str, range(14))), "--block-size", "4")

    exported = octavo_kv(filled, "export", str(tmp_path / "salted.kv"), *tokens, "--cache-salt", "mine")

    assert exported.stdout.startswith("2 blocks")
    assert octavo_kv(filled, "export", str(tmp_path / "other.kv"), *tokens).stdout.startswith("0 blocks")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "1,two"), "--tokens: '1,two' are no token ids, like 1,2,3"),
        (("--tokens", "1,2,3"), "--block-size: the prompt has 3 tokens and fills no block of 16"),
        (("--tokens", "1", "--prompt", "a"), "--prompt: give one of --prompt, --tokens and --key"),
        (("--prompt", "a", "--target", "unix:/nowhere/kv.sock"), "unix:/nowhere/kv.sock"),
    ],
)
def test_a_prompt_that_is_none_is_one_line(
    filled: StoreProcess, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = octavo_kv(filled, "export", str(tmp_path / "x.kv"), *arguments)

    assert result.exit_code != 0
    assert message in " ".join(result.stderr.split())
    assert not list(tmp_path.glob("x.kv*"))


def test_a_block_with_wrong_bytes_is_not_imported(filled: StoreProcess, tmp_path: Path) -> None:
    file = tmp_path / "blocks.kv"
    octavo_kv(filled, "export", str(file))
    octavo_kv(filled, "drop", "--yes")
    data = bytearray(file.read_bytes())
    data[data.index(bytes(data_of(3))) + 5] ^= 1
    file.write_bytes(data)

    imported = octavo_kv(filled, "import", str(file))

    assert imported.exit_code == 1
    assert imported.stdout == "4 blocks, 4 of them on disk; 1 had wrong bytes, 0 found no room\n"
    assert look_up(filled, 3) == []


def test_drop_asks_first(filled: StoreProcess) -> None:
    result = CliRunner().invoke(app, ["kv", "drop", "--disk-dir", str(filled.disk_dir)], input="n\n")

    assert result.exit_code == 1
    assert listed(filled) == {"shm": 5, "disk": 3}


def test_neither_store_nor_folder_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["kv", "list", "--disk-dir", str(tmp_path / "none")])

    assert result.exit_code == 2
    assert result.stderr.startswith("error: no block store runs and there is no folder")
