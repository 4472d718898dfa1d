"""`octavo up` and `octavo demo` as real processes, with fake services in front of the real ones on the path."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from octavo.client import OctavoClient
from tests.unit.octavo.cli.test_stack import wait_gone

ROOT = Path(__file__).parents[4]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Modules of the services' names that are fakes, and a folder for what the command leaves behind."""
    fakes = tmp_path / "fakes"
    for package, name in (("kvstore_svc", "'kvstore'"), ("scheduler_svc", "'scheduler'")):
        (fakes / package).mkdir(parents=True)
        (fakes / package / "__main__.py").write_text(f"from tests.unit.octavo.cli.fake_service import main\nmain({name})\n")
    (fakes / "executor_svc" / "model").mkdir(parents=True)
    name = "sys.argv[sys.argv.index('--executor-id') + 1]"
    (fakes / "executor_svc" / "__main__.py").write_text(
        f"import sys\nfrom tests.unit.octavo.cli.fake_service import main\nmain({name})\n"
    )
    (fakes / "executor_svc" / "model" / "prepare.py").write_text(
        "import sys\nif sys.argv[1] == 'missing': sys.exit('error: no model missing')\nprint('converting')\nprint('/models/m')\n"
    )
    (tmp_path / "t").mkdir()
    for folder in ("executor_svc", "executor_svc/model", "kvstore_svc", "scheduler_svc"):
        (fakes / folder / "__init__.py").write_text("")
    return {**os.environ, "PYTHONPATH": f"{fakes}:{ROOT}", "TMPDIR": str(tmp_path / "t"), "PWD": str(fakes)}


@contextmanager
def octavo(environment: dict[str, str], *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    program = [sys.executable, "-c", "from octavo.cli.main import main; main()", *arguments]
    folder = environment["PWD"]  # python -m looks there first
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    """What the process says on standard error up to the line with the words."""
    assert process.stderr is not None
    text = ""
    for line in process.stderr:
        text += line
        if words in line:
            return text
    raise AssertionError(f"{words!r} was never said:\n{text}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_a_signal_and_leaves_nothing(number: int, environment: dict[str, str], tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/public.sock"
    with octavo(environment, "up", "--executors", "2", "--listen", target) as process:
        start = read_until(process, "Ctrl-C stops it")
        children = psutil.Process(process.pid).children(recursive=True)
        with OctavoClient(target) as client:
            assert client.generate("one two").text == "two one"
        process.send_signal(number)
        _, end = process.communicate(timeout=60)

    assert process.returncode == 0
    assert len(children) == 4
    assert not any(child.is_running() for child in children)
    for words in (
        "prepare    │ converting",
        "kvstore    │ ",
        "executor-1 is ready",
        "scheduler is ready",
        f"octavo chat --target {target}",
    ):
        assert words in start
    stops = [line.split()[0] for line in end.splitlines() if line.endswith(" stopped")]
    assert stops == ["scheduler", "executor-1", "executor-0", "kvstore"]
    assert list((tmp_path / "t").iterdir()) == []


@pytest.mark.parametrize("name", ["kvstore", "executor-0", "scheduler"])
def test_up_says_why_a_service_cannot_start_and_stops_the_others(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    with octavo({**environment, "FAKE_BEHAVIOUR": f"{name}=refuse"}, "up", "--listen", f"unix:{tmp_path}/p.sock") as process:
        _, said = process.communicate(timeout=60)

    assert process.returncode == 2
    assert said.splitlines()[-1] == f"error: {name} ended at its start (exit code 1: no room for {name})"
    assert "Traceback" not in said
    assert list((tmp_path / "t").iterdir()) == []


def test_up_says_why_a_model_cannot_be_prepared(environment: dict[str, str], tmp_path: Path) -> None:
    with octavo(environment, "up", "--model", "missing", "--listen", f"unix:{tmp_path}/p.sock") as process:
        _, said = process.communicate(timeout=60)

    assert process.returncode == 2
    assert said.splitlines()[-1] == "error: prepare failed (exit code 1: no model missing)"


def test_up_refuses_a_port_in_use_before_it_prepares_anything(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        with octavo(environment, "up", "--listen", target) as process:
            _, said = process.communicate(timeout=60)

    assert process.returncode == 2
    assert said.startswith(f"error: cannot listen on {target}: Address already in use")
    assert said.count("\n") == 1


def test_up_takes_its_children_along_when_it_is_killed(environment: dict[str, str], tmp_path: Path) -> None:
    with octavo(environment, "up", "--listen", f"unix:{tmp_path}/p.sock") as process:
        read_until(process, "Ctrl-C stops it")
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()

        assert len(children) == 3
        assert all(wait_gone(child.pid) for child in children)


def test_up_can_be_stopped_while_it_starts(environment: dict[str, str], tmp_path: Path) -> None:
    with octavo({**environment, "FAKE_BEHAVIOUR": "scheduler=mute"}, "up", "--listen", f"unix:{tmp_path}/p.sock") as process:
        read_until(process, "executor-0 is ready")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)

    assert process.returncode == 0
    assert not any(child.is_running() for child in children)


def test_demo_asks_twice_and_stops_everything(environment: dict[str, str], tmp_path: Path) -> None:
    with octavo(environment, "demo", "--prompt", "one two three") as process:
        answer, said = process.communicate(timeout=60)

    assert process.returncode == 0
    assert answer.split("\n") == ["three two one", "three two one", ""]
    assert said.count("3 tokens · 2.0 tokens/s · first token after 0.50 s · prompt of 3 tokens: 1 device, 2 computed") == 2
    assert "kvstore stopped" in said
    assert list((tmp_path / "t").iterdir()) == []


def test_demo_that_fails_shows_the_log(environment: dict[str, str]) -> None:
    with octavo({**environment, "FAKE_BEHAVIOUR": "executor-0=refuse"}, "demo") as process:
        _, said = process.communicate(timeout=60)

    assert process.returncode == 2
    assert "cannot start: no room for executor-0" in said
    assert said.splitlines()[-1].startswith("error: executor-0 ended at its start")
