"""Norms, activations and products compile for the architectures we name, and fit into their shared memory. Needs no GPU."""

import subprocess
import sys
from collections import Counter

import pytest


@pytest.mark.parametrize(("capability", "dtype"), [(80, "float16"), (90, "bfloat16"), (90, "float16"), (100, "bfloat16")])
def test_kernels_compile(capability: int, dtype: str) -> None:
    command = [sys.executable, "-m", "tests.unit.executor_svc.kernels.triton.compile_products", str(capability), dtype]
    # The environment of this process asks for the interpreter.
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"}, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Counter(done.stdout.split()) == {"_rms_norm_kernel": 4, "_act_mul_kernel": 2, "_reduce_kernel": 4, "_tensor_kernel": 6}
