"""A Triton driver without a device: launches compile for an architecture, check what the device could hold, and do nothing.

What is compiled is exactly what a launch on such a device would compile. Needs a process in which kernels are not interpreted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Shared memory that one program may take, by architecture."""


class CompileOnlyDriver:
    """Stands for a device of one architecture. Its number as a device is the architecture, so that caches keep them apart.

    Attributes:
        capability: the architecture, for example 90.
        compiled: names of kernels in the order in which they were loaded.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.compiled: list[str] = []
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=self._properties)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, int, int, int, int]:
        self.compiled.append(name)
        return object(), 0, 0, 0, 1024

    def _properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self.capability]}


@contextmanager
def compiling_for(capability: int) -> Iterator[CompileOnlyDriver]:
    """Launches inside the with block compile for this architecture."""
    stand_in = CompileOnlyDriver(capability)
    driver.set_active(stand_in)
    try:
        yield stand_in
    finally:
        driver._active = None
