"""Kernels are compiled once, and one process's cache serves another."""

import subprocess
import sys
from pathlib import Path

import numba

from executor_svc.kernels.cpu.compile import Kernel, OpenMp
from executor_svc.kernels.cpu.norm import rms_norm_f32

_SCRIPT = """
from executor_svc.kernels.cpu.norm import rms_norm_f32
rms_norm_f32.compile()
print(rms_norm_f32.from_cache)
"""

_FULL_DISK_SCRIPT = """
import resource
from executor_svc.kernels.cpu import compile, norm
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # from now on every write to a file fails
norm.rms_norm_f32.compile()
import torch
from torch.nn import functional
x, weight = torch.randn(3, 64), torch.randn(64)
torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), functional.rms_norm(x, (64,), weight, 1e-5))
print(compile._degraded.counts)
"""


def test_torch_has_loaded_an_openmp_library_that_kernels_run_on() -> None:
    openmp = OpenMp()

    assert openmp.parallel is not None
    assert all(openmp.functions)


def test_another_process_takes_the_kernel_from_the_cache() -> None:
    rms_norm_f32.compile()

    shown = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={"NUMBA_CACHE_DIR": str(Path(numba.config.CACHE_DIR).parent), "PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert shown.stdout.strip() == "True"


def test_a_full_disk_costs_the_cache_and_not_the_start(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", _FULL_DISK_SCRIPT],
        env={"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert shown.stdout.strip() == "Counter({'kernel_cache_unwritable': 1})"


def test_every_kernel_has_a_name_of_its_own() -> None:
    names = [kernel.name for kernel in Kernel.all]

    assert len(names) == len(set(names))
