"""Set-up: what it decides and says, without running pip's network part."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.environment import ROOT, Pip, Requirements, SetupError, diagnosis, is_cuda_build, is_sound, stamp_of


def test_requirements_come_from_pyproject() -> None:
    requirements = Requirements.read(ROOT / "pyproject.toml")

    assert requirements.torch.startswith("torch>=")
    assert any(requirement.startswith("pytest>=") for requirement in requirements.groups["dev"])


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError: Failed to establish a new connection: [Errno 101] Network is unreachable", "no network"),
        ("Temporary failure in name resolution\nERROR: Could not find a version that satisfies", "no network"),
        ("ERROR: Could not find a version that satisfies the requirement nonsense", "lacks a package"),
    ],
)
def test_a_failure_of_pip_is_told_in_one_sentence(output: str, sentence: str) -> None:
    assert sentence in str(diagnosis(output))


def test_an_unknown_failure_of_pip_has_no_sentence_of_its_own() -> None:
    assert diagnosis("something else") is None


def test_a_failed_pip_leaves_its_output_in_the_log(tmp_path: Path) -> None:
    pip = Pip(Path(sys.executable), tmp_path / "setup.log", verbose=False)

    with pytest.raises(SetupError, match="pip failed"):
        pip.run("no-such-command")

    assert "no-such-command" in (tmp_path / "setup.log").read_text()


def test_a_build_that_brings_cuda_is_told_from_one_that_does_not() -> None:
    assert is_cuda_build({"metadata": {"requires_dist": ["filelock", "nvidia-cublas==13.0; platform_system == 'Linux'"]}})
    assert not is_cuda_build({"metadata": {"requires_dist": ["filelock", "sympy>=1.13"]}})


def test_the_stamp_depends_on_the_machine() -> None:
    assert stamp_of(gpu=False) == stamp_of(gpu=False) != stamp_of(gpu=True)


def test_an_environment_without_python_or_of_another_version_is_not_sound(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3 9\n")
    other.chmod(0o755)

    assert is_sound(Path(sys.executable))
    assert not is_sound(tmp_path / "none")
    assert not is_sound(other)


def test_without_a_fitting_python_the_sentence_names_the_package(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)

    done = _set_up_with(old)

    assert done.returncode == 1
    assert "no Python 3.11 or 3.12 found" in done.stderr
    assert "apt-get install" in done.stderr


def test_without_the_venv_module_the_sentence_names_the_package(tmp_path: Path) -> None:
    bare = tmp_path / "python3"
    bare.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; *) echo 3.11;; esac\n')
    bare.chmod(0o755)

    done = _set_up_with(bare)

    assert done.returncode == 1
    assert "apt-get install python3.11-venv" in done.stderr


def _set_up_with(python: Path) -> "subprocess.CompletedProcess[str]":
    environment = {"PYTHON": str(python), "PATH": "/usr/bin:/bin"}
    return subprocess.run([str(ROOT / "scripts" / "setup")], env=environment, capture_output=True, text=True, timeout=30)
