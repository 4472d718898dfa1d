"""Kernels: functions over one struct of arguments, compiled at first use, kept on disk, run on torch's own threads.

Knows numba's C functions, the OpenMP library that torch has loaded and how arguments are packed. Does not know what a
kernel computes. A pool of our own would compete with torch's threads, which spin for a while after each of its operations.
A kernel is `def f(args: int64)`, args the address of 8-byte fields; the first four are this module's.
"""

import ctypes
import hashlib
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba import cfunc, njit, types

from common.degraded import DegradedPaths
from executor_svc.kernels.cpu.vector import atomic_add, call_address, load_i64

_degraded = DegradedPaths()

FIRST_ARG = 4
"""Index of the first field that is a kernel's own. Before it: three functions of the OpenMP library, and the team's counters."""
COUNTERS = 3
NUM_COUNTERS = 64
"""Of a team, int64, each on a cache line of its own; zero when a kernel starts."""
COUNTER_STRIDE = 8


def _source_digest() -> str:
    """Names the sources: numba itself notices only a change of the file that a kernel is written in."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _use_cache_folder() -> None:
    """Keeps compiled kernels in a folder of their own per version of the sources."""
    root = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else Path.home() / ".cache" / "octavo"
    folder = root / f"kernels-{_source_digest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _degraded.note("kernel_cache_unwritable", f"{folder}: {error.strerror}")
        folder = Path(tempfile.mkdtemp(prefix="octavo-kernels-"))
    numba.config.CACHE_DIR = str(folder)


_use_cache_folder()

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def named(suffix: str) -> Callable[[FunctionT], Any]:
    """Compiles an inner function of a factory under a name of its own.

    numba's symbols are the function's name and a counter of the process. Kernels from the cache come from several
    processes, and the linker takes the first of two symbols of one name: the name alone must say what the code is.
    """

    def compiled(function: FunctionT) -> Any:
        function.__name__ = f"{function.__name__}_{suffix}"
        function.__qualname__ = f"{function.__qualname__}_{suffix}"
        return njit(error_model="numpy")(function)

    return compiled


@njit(error_model="numpy")
def thread_idx(args):  # type: ignore[no-untyped-def]
    """Index of the calling thread in its team."""
    function = load_i64(args, 0)
    return call_address(function) if function != 0 else 0


@njit(error_model="numpy")
def num_threads(args):  # type: ignore[no-untyped-def]
    """Threads of the team."""
    function = load_i64(args, 1)
    return call_address(function) if function != 0 else 1


@njit(error_model="numpy")
def barrier(args):  # type: ignore[no-untyped-def]
    """Waits for the whole team."""
    function = load_i64(args, 2)
    if function != 0:
        call_address(function)


@njit(error_model="numpy")
def claim(args, counter):  # type: ignore[no-untyped-def]
    """The next number of a counter, from 0 on: every number goes to one thread."""
    return atomic_add(load_i64(args, COUNTERS) + 8 * COUNTER_STRIDE * counter, 1)


class OpenMp:
    """The OpenMP library that torch has loaded; has no threads if there is none that speaks libgomp's interface."""

    def __init__(self) -> None:
        self.path = _loaded_openmp()
        self.functions = (0, 0, 0)
        self.parallel: Callable[[int, bytes, int, int], None] | None = None
        if self.path is not None:
            # PyDLL keeps the GIL: a kernel takes microseconds, taking the GIL back from a busy thread takes 5 ms.
            library = ctypes.PyDLL(self.path)
            addresses = [
                ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
                for name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
            ]
            self.functions = (addresses[0], addresses[1], addresses[2])
            parallel = library.GOMP_parallel
            parallel.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
            parallel.restype = None
            self.parallel = parallel


def _loaded_openmp() -> str | None:
    """Path of a loaded OpenMP library with libgomp's entry points."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if line.count("/")}
    candidates = [p for p in paths if Path(p).name.startswith(("libgomp", "libomp", "libiomp5"))]
    # A process may have loaded several (scikit-learn brings its own): torch's is the one beside it.
    candidates.sort(key=lambda p: (not p.startswith(str(Path(torch.__file__).parent)), p))
    return next((p for p in candidates if hasattr(ctypes.PyDLL(p), "GOMP_parallel")), None)


class Kernel:
    """One compiled function; compiles when it is first called.

    Attributes:
        name: of the function.
        compile_s: what compiling, or loading from the cache, took; None before that.
        from_cache: whether it came from the disk.
    """

    openmp: OpenMp | None = None
    counters = np.zeros(NUM_COUNTERS * COUNTER_STRIDE, np.int64)
    """Of a kernel that is called by itself."""
    counters_address = int(counters.ctypes.data)
    all: list["Kernel"] = []  # noqa: RUF012  # the registry that warm_up walks

    def __init__(self, function: Callable[[int], None], fields: str):
        self.name = function.__name__
        self.compile_s: float | None = None
        self.from_cache = False
        self._function = function
        self._pack = struct.Struct("4q" + fields).pack
        self._call_serially: Any = None
        self._address = 0
        Kernel.all.append(self)

    def compile(self) -> None:
        """Compiles, or loads from the cache."""
        if self._address:
            return
        if Kernel.openmp is None:
            Kernel.openmp = OpenMp()
        start = time.perf_counter()
        try:
            compiled = cfunc(types.void(types.int64), cache=True, error_model="numpy")(self._function)
        except OSError as error:  # a full disk: numba compiles, and fails when it writes
            _degraded.note("kernel_cache_unwritable", f"{numba.config.CACHE_DIR}: {error.strerror}")
            compiled = cfunc(types.void(types.int64), error_model="numpy")(self._function)
        self.compile_s = time.perf_counter() - start
        self.from_cache = compiled.cache_hits > 0
        self._address = compiled.address
        self._call_serially = ctypes.PYFUNCTYPE(None, ctypes.c_char_p)(self._address)

    @property
    def address(self) -> int:
        """Of the compiled function `void f(int64 args)`."""
        self.compile()
        return self._address

    def pack(self, *fields: float, threads: int) -> bytes:
        """The arguments as the compiled function reads them, for a team of so many threads that share Kernel.counters."""
        self.compile()
        assert Kernel.openmp is not None
        functions = Kernel.openmp.functions if threads > 1 and Kernel.openmp.parallel is not None else (0, 0, 0)
        return self._pack(*functions, Kernel.counters_address, *fields)

    def __call__(self, *fields: float, threads: int) -> None:
        """Runs on so many of torch's threads, the calling one among them; returns when all are done.

        Args:
            fields: int64 (addresses, sizes) or float64 as the kernel reads them.
            threads: 1 runs in the caller alone.
        """
        if not self._address:
            self.compile()
        openmp = Kernel.openmp
        if threads > 1 and openmp is not None and openmp.parallel is not None:
            Kernel.counters.fill(0)
            openmp.parallel(self._address, self._pack(*openmp.functions, Kernel.counters_address, *fields), threads, 0)
        else:
            self._call_serially(self._pack(0, 0, 0, 0, *fields))


def kernel(fields: str) -> Callable[[Callable[[int], None]], Kernel]:
    """Makes a function a Kernel.

    Args:
        fields: struct format of its own arguments, q for int64 and d for float64.
    """
    return lambda function: Kernel(function, fields)
