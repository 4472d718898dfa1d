"""A connected socket with deadlines. Knows bytes and time; not what they mean.

A plain socket blocks in the kernel, with the kernel's own timeouts: Python's would ask the system twice for each piece and let
go of the interpreter lock each time, which halves the bandwidth of blocks of 256 KiB. TLS does not work with those, so a TLS
socket has Python's timeouts.
"""

import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from common.clock import Clock

T = TypeVar("T")
_TIMEVAL = struct.Struct("ll")
# Setting a timeout anew for each piece costs more than it is worth, as long as it is about right.
_ABOUT = 0.1


class DeadlineSocket(Protocol):
    """What one question and its answer need."""

    def send(self, data: bytes | memoryview, deadline_s: float) -> None:
        """Sends all of data; raises OSError, TimeoutError when it is too late."""
        ...

    def receive(self, into: memoryview, deadline_s: float) -> int:
        """Receives at least a byte and returns how many; raises OSError, TimeoutError when it is too late."""
        ...

    def receive_some(self, buffers: Sequence[memoryview], deadline_s: float) -> int:
        """The same into several buffers, one after the other, as far as there is something to receive."""
        ...

    def receive_all(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        """Fills buffers one after the other; raises OSError, TimeoutError when it is too late."""
        ...


def with_deadlines(sock: socket.socket, clock: Clock) -> DeadlineSocket:
    """The right one of them for a connected socket."""
    return _TlsSocket(sock, clock) if isinstance(sock, ssl.SSLSocket) else _PlainSocket(sock, clock)


class _PlainSocket:
    """See the module's first lines."""

    def __init__(self, sock: socket.socket, clock: Clock):
        self._socket = sock
        self._clock = clock
        self._timeout_s = 0.0
        sock.settimeout(None)

    def send(self, data: bytes | memoryview, deadline_s: float) -> None:
        view = memoryview(data)
        while len(view) > 0:
            self._set_timeout(deadline_s)
            view = view[_in_time(self._socket.send, view) :]

    def receive(self, into: memoryview, deadline_s: float) -> int:
        self._set_timeout(deadline_s)
        return _some(_in_time(self._socket.recv_into, into))

    def receive_some(self, buffers: Sequence[memoryview], deadline_s: float) -> int:
        self._set_timeout(deadline_s)
        return _some(_in_time(self._receive_into, buffers))

    def receive_all(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        while buffers:
            self._set_timeout(deadline_s)
            buffers = behind(buffers, _some(_in_time(self._receive_waiting, buffers)))

    def _receive_into(self, buffers: Sequence[memoryview]) -> int:
        return self._socket.recvmsg_into(buffers)[0]

    def _receive_waiting(self, buffers: Sequence[memoryview]) -> int:
        return self._socket.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]

    def _set_timeout(self, deadline_s: float) -> None:
        remaining_s = _remaining_s(deadline_s, self._clock)
        if abs(remaining_s - self._timeout_s) > _ABOUT * remaining_s:
            self._timeout_s = remaining_s
            value = _TIMEVAL.pack(int(remaining_s), int(remaining_s % 1 * 1e6) or 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


class _TlsSocket:
    """See the module's first lines."""

    def __init__(self, sock: socket.socket, clock: Clock):
        self._socket = sock
        self._clock = clock

    def send(self, data: bytes | memoryview, deadline_s: float) -> None:
        self._socket.settimeout(_remaining_s(deadline_s, self._clock))
        self._socket.sendall(data)

    def receive(self, into: memoryview, deadline_s: float) -> int:
        self._socket.settimeout(_remaining_s(deadline_s, self._clock))
        return _some(self._socket.recv_into(into))

    def receive_some(self, buffers: Sequence[memoryview], deadline_s: float) -> int:
        return self.receive(buffers[0], deadline_s)

    def receive_all(self, buffers: Sequence[memoryview], deadline_s: float) -> None:
        for buffer in buffers:
            start = 0
            while start < len(buffer):
                start += self.receive(buffer[start:], deadline_s)


def behind(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left to fill when num_bytes have been received."""
    left = []
    for buffer in buffers:
        if num_bytes < len(buffer):
            left.append(buffer[num_bytes:])
        num_bytes = max(0, num_bytes - len(buffer))
    return left


def _remaining_s(deadline_s: float, clock: Clock) -> float:
    remaining_s = deadline_s - clock.now()
    if remaining_s <= 0:
        raise TimeoutError("no answer in time")
    return remaining_s


def _some(num_bytes: int) -> int:
    if num_bytes == 0:
        raise ConnectionResetError("the server closed the connection")
    return num_bytes


def _in_time(call: Callable[[T], int], argument: T) -> int:
    """What a blocking call says whose time was up in the kernel is "try again"."""
    try:
        return call(argument)
    except BlockingIOError:
        raise TimeoutError("no answer in time") from None
