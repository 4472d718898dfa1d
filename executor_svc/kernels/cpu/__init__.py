"""Paged attention and fused operations on the CPU, compiled by numba at first use."""

from executor_svc.kernels.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
