"""`octavo executors` against a scheduler that has none of its own."""

import json

from typer.testing import CliRunner, Result

from octavo.cli.main import app
from tests.unit.octavo.conftest import Served


def executors(served: Served, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["executors", *arguments, "--target", served.target])


def test_list_shows_where_they_are_and_how_they_do(served: Served) -> None:
    executors(served, "add", "host:7")
    lines = executors(served, "list").stdout.splitlines()
    assert [line.split()[0] for line in lines][::2] == ["address", "host:7"]
    assert lines[-1].split()[:4] == ["host:7", "new", "leaving", "3"]
    rows = json.loads(executors(served, "list", "--json").stdout)
    assert rows[-1]["address"] == "host:7" and rows[-1]["num_requests"] == 3


def test_add_waits_until_it_is_connected(served: Served) -> None:
    result = executors(served, "add", "host:7")
    assert result.exit_code == 0
    assert "host:7 has joined: new" in result.output


def test_remove_waits_until_it_has_left(served: Served) -> None:
    executors(served, "add", "host:7")
    result = executors(served, "remove", "host:7")
    assert result.exit_code == 0
    assert "host:7 has left" in result.output


def test_remove_says_when_it_has_not_left_yet(served: Served) -> None:
    executors(served, "add", "host:7")
    result = executors(served, "remove", "host:7", "--drain", "7200", "--wait", "0")
    assert result.exit_code == 1
    assert "3 requests are left" in result.output


def test_a_stranger_is_an_error_of_one_line(served: Served) -> None:
    result = executors(served, "remove", "stranger:1")
    assert result.exit_code == 2
    assert "stranger:1 is no executor" in result.output
