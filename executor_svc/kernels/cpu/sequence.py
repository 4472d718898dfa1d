"""Kernels one after the other in one parallel region: the threads meet at a barrier after each instead of ending.

Knows addresses of kernels and of their arguments. Does not know what they compute. A decode step is some 200 kernels of a few
microseconds to a tenth of a millisecond; calling each from Python would cost a fifth of the step.
"""

import numpy as np
import numpy.typing as npt

from executor_svc.kernels.cpu.compile import COUNTER_STRIDE, COUNTERS, FIRST_ARG, NUM_COUNTERS, barrier, kernel
from executor_svc.kernels.cpu.vector import call_kernel, load_i64

_NUM_KERNELS, _LIST = FIRST_ARG, FIRST_ARG + 1


@kernel("2q")
def run_sequence(args: int) -> None:
    """Runs the kernels of a list of (address of the function, address of its arguments)."""
    entries = load_i64(args, _LIST)
    for i in range(load_i64(args, _NUM_KERNELS)):
        call_kernel(load_i64(entries, 2 * i), load_i64(entries, 2 * i + 1))
        barrier(args)


class KernelSequence:
    """A list of kernels with their arguments, run as one.

    Attributes:
        arguments: int64 [num_kernels, widest arguments]; row i belongs to kernel i and may be changed between runs.
        addresses: int64 [num_kernels], of the kernels; likewise.

    Args:
        kernels: (address, packed arguments) in order; the arguments packed for so many threads.
        threads: of the team.
    """

    def __init__(self, kernels: list[tuple[int, bytes]], threads: int):
        self._threads = threads
        width = max(len(packed) for _, packed in kernels) // 8
        self.arguments: npt.NDArray[np.int64] = np.zeros((len(kernels), width), np.int64)
        self._entries: npt.NDArray[np.int64] = np.empty((len(kernels), 2), np.int64)
        self._counters: npt.NDArray[np.int64] = np.zeros((len(kernels), COUNTER_STRIDE * min(threads, NUM_COUNTERS)), np.int64)
        for i, (address, packed) in enumerate(kernels):
            row = np.frombuffer(packed, np.int64)
            self.arguments[i, : len(row)] = row
            self._entries[i] = address, self.arguments[i].ctypes.data
        self.addresses = self._entries[:, 0]
        self._counter_addresses = self._counters.ctypes.data + np.arange(len(kernels)) * self._counters.strides[0]

    def run(self) -> None:
        """Runs all of them, each with counters of its own: a thread may be one kernel ahead of the others."""
        self._counters.fill(0)
        self.arguments[:, COUNTERS] = self._counter_addresses
        run_sequence(len(self._entries), self._entries.ctypes.data, threads=self._threads)
