"""Short launches: in Triton's interpreter, and over a driver that only notes what would reach the device."""

import subprocess
import sys

import torch

from executor_svc.kernels.triton.launch import Launch
from tests.unit.executor_svc.kernels.triton.launch_kernel import scaled_rows, scaled_rows_reference


def test_an_interpreted_kernel_computes() -> None:
    launch, x = Launch(scaled_rows), torch.randn(200)
    for size, stride, picked in ((5, 16, [2, 0]), (16, 1, [7, 9]), (30, 33, [3, 5])):
        out = torch.full((2, size), float("nan"))
        launch((2, 2), x, torch.tensor(picked), out, size, stride, 0.5, WIDTH=16, ADD=3)
        torch.testing.assert_close(out.double(), scaled_rows_reference(x, torch.tensor(picked), size, stride, 0.5, 3))


def test_the_device_is_asked_for_what_triton_asks_for() -> None:
    command = [sys.executable, "-m", "tests.unit.executor_svc.kernels.triton.compile_launches"]
    # The environment of this process asks for the interpreter.
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"}, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 20, "variants that differ"
