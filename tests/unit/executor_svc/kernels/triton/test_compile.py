"""Every kernel compiles for the architectures we name, and fits into their shared memory. No GPU is needed."""

import os
import subprocess
import sys
from collections import Counter

import pytest

E4M3 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("capability", "dtype", "cache_dtype"),
    [
        (80, "float16", "float16"),
        (86, "bfloat16", "bfloat16"),
        (90, "bfloat16", "bfloat16"),
        (100, "bfloat16", "bfloat16"),
        (89, "float32", E4M3),
        (90, "bfloat16", E4M3),
        (100, "float16", E4M3),
    ],
)
def test_kernels_compile(capability: int, dtype: str, cache_dtype: str) -> None:
    module = "tests.unit.executor_svc.kernels.triton.compile_kernels"
    command = [sys.executable, "-m", module, str(capability), dtype, cache_dtype]
    not_interpreted = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=not_interpreted, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Counter(done.stdout.split()).keys() == {
        "paged_decode_kernel",
        "shared_prefix_kernel",
        "_paged_prefill_kernel",
        *(["_encode_kv_kernel"] if cache_dtype == E4M3 else ["_write_kv_kernel", "_compress_kernel", "_restore_kernel"]),
        "_gather_kernel",
        "_rope_write_kv_kernel",
    }
