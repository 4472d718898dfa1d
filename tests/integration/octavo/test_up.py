"""`octavo up` with real services that refuse what they are told: the last line says which setting, and why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.executor_svc.tiny_engine import make_model_folder

CLI = (sys.executable, "-c", "from octavo.cli.main import main; main()")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--executor-args", "--kv-dtyp fp8_e4m3"], "unrecognized arguments: --kv-dtyp fp8_e4m3"),
        (["--scheduler-args", "--policy lottery"], "--policy: Input should be 'fair', 'fcfs' or 'priority'"),
        (
            ["--executor-args", "--device cpu --kv-stored-form int8"],
            "kv_stored_form: int8 is made on a GPU; a CPU stores blocks as",
        ),
    ],
)
def test_a_wrong_setting_of_a_service_is_named_in_the_last_line(flags: list[str], words: str, tmp_path: Path) -> None:
    model = ["--model", str(make_model_folder(tmp_path)), "--load-format", "random", "--kv-blocks", "64"]
    store = ["--store-capacity", "16MiB", "--disk-capacity", "0", "--disk-dir", str(tmp_path / "kv")]
    command = [*CLI, "up", "--listen", f"unix:{tmp_path}/p.sock", *model, *store, *flags]

    process = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "TMPDIR": str(tmp_path)}
    )

    assert process.returncode == 2
    assert words in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr
