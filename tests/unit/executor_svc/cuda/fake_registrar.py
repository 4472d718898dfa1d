"""Registers nothing, and remembers what it should have registered."""

import threading


class FakeRegistrar:
    """A Registrar.

    Attributes:
        ranges: bytes by address, of what is registered now.
        refuses_from: the how-manyth call of register fails, and all after it.
        gate: calls wait for it.
        entered: set by every call of register.
    """

    def __init__(self, refuses_from: int | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.refuses_from = refuses_from
        self.num_calls = 0
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def register(self, address: int, num_bytes: int) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        assert address % 4096 == 0 and num_bytes % 4096 == 0 and address not in self.ranges
        self.num_calls += 1
        if self.refuses_from is not None and self.num_calls > self.refuses_from:
            raise RuntimeError("cudaHostRegister: out of memory (CUDA error 2)")
        self.ranges[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.ranges[address]

    def covers(self, address: int, num_bytes: int) -> bool:
        """Whether one registration has all of these bytes."""
        return any(start <= address and address + num_bytes <= start + size for start, size in self.ranges.items())
