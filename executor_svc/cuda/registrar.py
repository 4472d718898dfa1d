"""Host memory that the GPU copies from and to by itself: the CUDA calls. Knows addresses only.

The memory must stay mapped while it is registered.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of this process


class Registrar(Protocol):
    """Registers memory. Lets other threads run meanwhile."""

    def register(self, address: int, num_bytes: int) -> None:
        """From now on copies of this memory need no detour. Both are multiples of the page size.

        Raises:
            RuntimeError: the system refuses.
        """
        ...

    def unregister(self, address: int) -> None:
        """The end of what register did for this address; no copy is under way there.

        Raises:
            RuntimeError: the device has failed.
        """
        ...


class CudaRegistrar:
    """A Registrar of one GPU."""

    def __init__(self, device: torch.device):
        self._device = device
        cudart: Callable[[], Any] = torch.cuda.cudart
        self._cudart = cudart()

    def register(self, address: int, num_bytes: int) -> None:
        """See Registrar."""
        with torch.cuda.device(self._device):
            self._check("cudaHostRegister", self._cudart.cudaHostRegister(address, num_bytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        """See Registrar."""
        with torch.cuda.device(self._device):
            self._check("cudaHostUnregister", self._cudart.cudaHostUnregister(address))

    def device_address(self, address: int) -> int:
        """The address by which kernels read a registered byte.

        Raises:
            RuntimeError: it is not registered.
        """
        found = ctypes.c_uint64(0)
        with torch.cuda.device(self._device):
            code = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0)
        if code != 0:
            raise RuntimeError(f"cuMemHostGetDevicePointer: CUDA driver error {code}")
        return found.value

    def _check(self, call: str, result: Any) -> None:
        code = int(result)
        if code != 0:
            raise RuntimeError(f"{call}: {self._cudart.cudaGetErrorString(result)} (CUDA error {code})")
