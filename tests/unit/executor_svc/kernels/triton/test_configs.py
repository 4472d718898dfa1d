"""The cache of tuned configurations: what is found, what is kept, and that a broken file costs nothing but a message."""

import json
import logging
from pathlib import Path

import pytest

from executor_svc.kernels.triton.configs import ConfigCache, default_config, lookup, open_cache, register_defaults, tune

SHAPE: dict[str, int | str | bool] = {"head_dim": 128, "dtype": "bfloat16"}
DEFAULTS = {80: {"tile": 32, "stages": 2}, 90: {"tile": 64, "stages": 3}}


@pytest.fixture(autouse=True)
def _defaults() -> None:
    register_defaults("doubling", DEFAULTS)
    open_cache(None)


@pytest.mark.parametrize(("capability", "tile"), [(75, 32), (80, 32), (89, 32), (90, 64), (120, 64)])
def test_defaults_are_those_of_the_nearest_architecture_below(capability: int, tile: int) -> None:
    assert default_config("doubling", capability)["tile"] == tile


def test_the_fastest_candidate_is_kept_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kernels.json"
    open_cache(path)
    costs = {16: 3.0, 32: 1.0, 64: 2.0}
    candidates = [{"tile": tile, "stages": 1} for tile in costs]
    assert tune("doubling", SHAPE, candidates, lambda config: costs[config["tile"]]) == {"tile": 32, "stages": 1}
    assert lookup("doubling", SHAPE) == {"tile": 32, "stages": 1}
    open_cache(path)
    assert lookup("doubling", SHAPE) == {"tile": 32, "stages": 1}
    assert lookup("doubling", {**SHAPE, "head_dim": 64}) == DEFAULTS[80]

    def must_not_run(config: dict[str, int]) -> float:
        raise AssertionError("measured although it is known")

    assert tune("doubling", SHAPE, candidates, must_not_run) == {"tile": 32, "stages": 1}


def test_candidates_that_do_not_run_are_skipped() -> None:
    def run(config: dict[str, int]) -> float:
        if config["tile"] == 64:
            raise RuntimeError("out of resources")
        return 1.0

    candidates = [{"tile": 64, "stages": 1}, {"tile": 16, "stages": 1}]
    assert tune("doubling", SHAPE, candidates, run)["tile"] == 16


def test_nothing_is_kept_when_no_candidate_runs() -> None:
    def run(config: dict[str, int]) -> float:
        raise ValueError("no")

    assert tune("doubling", SHAPE, [{"tile": 64, "stages": 1}], run) == DEFAULTS[80]
    assert lookup("doubling", SHAPE) == DEFAULTS[80]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 99, "entries": {}}', '{"version": 1, "entries": {"a": 3}}', '{"version": 1}']
)
def test_a_broken_file_is_an_empty_one(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        cache = ConfigCache(path, "device", 90)
    assert cache.find("doubling", SHAPE) is None
    assert len(caplog.records) == 1
    cache.put("doubling", SHAPE, {"tile": 16})
    assert ConfigCache(path, "device", 90).find("doubling", SHAPE) == {"tile": 16}


def test_a_file_that_cannot_be_written_costs_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = ConfigCache(tmp_path / "file" / "kernels.json", "device", 90)
    with caplog.at_level(logging.WARNING):
        cache.put("doubling", SHAPE, {"tile": 16})
    assert "cannot be kept" in caplog.text
    assert cache.find("doubling", SHAPE) == {"tile": 16}


def test_entries_of_other_devices_stay(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    ConfigCache(path, "one", 90).put("doubling", SHAPE, {"tile": 16})
    other = ConfigCache(path, "other", 90)
    assert other.find("doubling", SHAPE) is None
    other.put("doubling", SHAPE, {"tile": 32})
    assert ConfigCache(path, "one", 90).find("doubling", SHAPE) == {"tile": 16}
    assert len(json.loads(path.read_text())["entries"]) == 2


def test_a_setting_that_an_old_file_lacks_is_the_default_one(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    open_cache(path)
    tune("doubling", SHAPE, [{"tile": 16}], lambda config: 1.0)
    assert lookup("doubling", SHAPE) == {"tile": 16, "stages": 2}
