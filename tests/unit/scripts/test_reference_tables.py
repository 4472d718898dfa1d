"""The tables of the documentation come from the code."""

import pytest

from scheduler_svc.settings import SchedulerSettings
from scripts.reference_tables import errors_table, settings_table, with_fresh_tables


def test_every_setting_has_a_row_with_its_meaning() -> None:
    rows = settings_table(SchedulerSettings).splitlines()[2:]

    assert len(rows) == len(SchedulerSettings.model_fields)
    assert "| `--listen` | `127.0.0.1:50051` | host:port or unix:/path of the public API |" in rows
    assert all(not row.endswith("|  |") for row in rows)


def test_every_error_has_a_row_and_start_up_is_no_status() -> None:
    table = errors_table()

    assert "| `QUEUE_FULL` | RESOURCE_EXHAUSTED | The bounded queue of requests is full. |" in table
    assert "STARTUP" not in table


def test_a_stale_table_is_replaced_and_the_rest_stays() -> None:
    page = "before\n<!-- table: errors -->\nold\n<!-- end of table -->\nafter\n"

    assert with_fresh_tables(page) == f"before\n<!-- table: errors -->\n{errors_table()}\n<!-- end of table -->\nafter\n"


def test_a_table_that_the_code_does_not_know_is_an_error() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        with_fresh_tables("<!-- table: nonsense -->\n<!-- end of table -->")
