"""Degraded paths: every time counted, said once until it has been fine again."""

import logging

import pytest

from common.degraded import DegradedPaths


def test_each_time_is_counted_and_the_first_is_said(caplog: pytest.LogCaptureFixture) -> None:
    degraded = DegradedPaths()

    with caplog.at_level(logging.INFO, logger="common.degraded"):
        degraded.note("store_unavailable", "connection refused")
        degraded.note("store_unavailable", "connection refused")
        degraded.note("no_shared_memory", "other host")

    assert degraded.counts == {"store_unavailable": 2, "no_shared_memory": 1}
    assert [record.getMessage().split(":")[1].strip() for record in caplog.records] == ["store_unavailable", "no_shared_memory"]


def test_after_it_was_fine_it_is_said_again(caplog: pytest.LogCaptureFixture) -> None:
    degraded = DegradedPaths()

    with caplog.at_level(logging.INFO, logger="common.degraded"):
        degraded.note("store_unavailable", "first")
        degraded.clear("store_unavailable")
        degraded.clear("store_unavailable")
        degraded.note("store_unavailable", "second")

    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert degraded.counts["store_unavailable"] == 2
