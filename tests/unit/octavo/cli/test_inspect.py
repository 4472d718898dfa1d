"""The command line of `octavo inspect`."""

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli.inspect import inspection_command
from octavo.cli.main import app


def test_every_batch_size_is_handed_on() -> None:
    command = inspection_command("folder", "1, 8", 512, "bfloat16", "random")
    assert command[1:] == [
        *("-m", "executor_svc.step_inspection", "--model", "folder", "--context", "512"),
        *("--dtype", "bfloat16", "--load-format", "random", "--batch-sizes", "1", "--batch-sizes", "8"),
    ]


@pytest.mark.parametrize("sizes", ["", "0", "1,x", "1,,2", "-3"])
def test_a_bad_list_of_sizes_is_named(sizes: str) -> None:
    with pytest.raises(typer.BadParameter, match="such as 1,8,32"):
        inspection_command("folder", sizes, 512, "auto", "auto")


def test_it_is_a_command() -> None:
    assert CliRunner().invoke(app, ["inspect", "--help"]).exit_code == 0
