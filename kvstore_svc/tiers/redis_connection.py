"""One connection to a Redis or Valkey server. Blocking: for one thread at a time, except abort.

Knows the protocol and deadlines. Does not know blocks, circuit breakers or asyncio. The library reads the URL, connects and
speaks TLS; hiredis packs commands and reads small replies. A block's bytes are received right into the caller's memory, past
the library, which would make a bytes object of them first (docs/decisions/ has the figures). Its handshake is not used either:
its timeouts are per packet, so that a server that sends a byte now and then would hold a thread for ever.

Nothing on the wire is trusted: a reply that is not what was asked for ends the connection, so that no late or foreign byte is
ever taken for the answer to the next question.
"""

import contextlib
import enum
import select
import socket
from collections.abc import Sequence
from math import inf
from typing import Any, cast

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, ResponseError
from redis.retry import Retry

from common.clock import Clock
from common.errors import StartupError
from kvstore_svc.tiers.redis_socket import DeadlineSocket, behind, with_deadlines

# All that goes wrong with a server or a network. ValueError: the library decodes what servers say in its handshake.
FAILURES = (OSError, redis.RedisError, hiredis.HiredisError, ValueError)
_READ_BYTES = 64 * 1024
# Of replies that hold no block: longer ones are no answer to anything that is asked here.
_MAX_REPLY_BYTES = 1 << 20
_NOT_ENOUGH = object()
# A connection that has answered just now is asked again without a look at it: for each block that would be one more way into
# the kernel, and one more turn of the interpreter lock.
_FRESH_S = 0.001


class Fetched(enum.Enum):
    """What became of a fetch."""

    HIT = "the value is there, with the length that was asked for"
    ABSENT = "no value"
    BAD = "a value that cannot be the one that was asked for"


class RedisConnection:
    """See the module's first lines. It connects when connect is called, and not again after a failure: make a new one.

    Args:
        pool: where the library's connection comes from; see connection_pool.
        timeout_s: to connect and authenticate.
        clock: of deadlines.
    """

    def __init__(self, pool: Any, timeout_s: float, clock: Clock):
        self._library = pool.make_connection()
        self._timeout_s = timeout_s
        self._clock = clock
        self._is_aborted = False
        self._heard_at_s = -inf
        self._socket: DeadlineSocket | None = None
        self._reader = _new_reader()
        self._buffer = memoryview(bytearray(_READ_BYTES))

    @property
    def is_ready(self) -> bool:
        """Whether it is connected and quiet. Something to read before a question was asked is the end, or out of step."""
        if self._socket is None or self._is_aborted:
            return False
        if self._clock.now() - self._heard_at_s < _FRESH_S:
            return True
        poll = select.poll()
        poll.register(self._library._sock, select.POLLIN)
        return not poll.poll(0)

    def connect(self) -> None:
        """Connects, authenticates and selects the database.

        Raises:
            one of FAILURES; it is closed then.
        """
        deadline_s = self._clock.now() + self._timeout_s
        try:
            self._library.connect()
            self._socket = with_deadlines(self._library._sock, self._clock)
            for command in _handshake(self._library):
                (reply,) = self.call([command], deadline_s=deadline_s)
                if reply != b"OK":
                    raise InvalidResponse(f"{command[0].decode()} is answered by {str(reply)[:100]!r}")
            if self._is_aborted:
                raise ConnectionAbortedError("given up while it connected")
        except BaseException:
            self.close()
            raise

    def abort(self) -> None:
        """Ends it from another thread: the call that is under way fails at once."""
        self._is_aborted = True
        sock = self._library._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of a TLS socket too: its own shutdown may not race with a read

    def close(self) -> None:
        """Gives the socket back. Not while a call is under way."""
        self._socket = None
        self._library.disconnect()

    def call(self, commands: Sequence[Sequence[bytes]], *, deadline_s: float, is_partial_good: bool = False) -> list[Any]:
        """Sends commands at once and reads a small reply to each; a reply that is an error is a ResponseError in the list.

        Args:
            commands: with their arguments.
            deadline_s: of the clock.
            is_partial_good: replies that came in time are good: then the list is shorter, and the connection is closed.

        Raises:
            one of FAILURES; the connection is closed then.
        """
        replies: list[Any] = []
        try:
            sock = self._ask([_pack(commands)], deadline_s)
            for _ in commands:
                replies.append(self._read_reply(sock, deadline_s))
            if self._reader.has_data():
                raise InvalidResponse("more replies than commands")
            self._heard_at_s = self._clock.now()
        except BaseException as error:
            self.close()
            if not (is_partial_good and replies and isinstance(error, TimeoutError)):
                raise
        return replies

    def fetch(self, command: bytes, header: memoryview, into: memoryview, *, deadline_s: float) -> Fetched:
        """Receives one long string.

        Args:
            command: GET or GETEX, as it goes over the wire.
            header: the string's first bytes; undefined unless it is a HIT.
            into: the rest of it, likewise.
            deadline_s: of the clock.

        Raises:
            one of FAILURES; the connection is closed then.
        """
        try:
            sock = self._ask([command], deadline_s)
            fetched = self._read_string(sock, header, into, deadline_s)
            self._heard_at_s = self._clock.now()
            return fetched
        except BaseException:
            self.close()
            raise

    def store(self, before: bytes, data: memoryview, after: bytes, *, deadline_s: float) -> Any:
        """Sends one command that has data in it, without copying it, and reads the small reply.

        Raises:
            one of FAILURES; the connection is closed then.
        """
        try:
            sock = self._ask([before, data, after], deadline_s)
            return self._read_reply(sock, deadline_s)
        except BaseException:
            self.close()
            raise

    def _ask(self, pieces: Sequence[bytes | memoryview], deadline_s: float) -> DeadlineSocket:
        """Sends a question; the socket that the answer comes from."""
        if self._socket is None or self._is_aborted:
            raise ConnectionAbortedError("the connection was given up")
        for piece in pieces:
            self._socket.send(piece, deadline_s)
        return self._socket

    def _read_reply(self, sock: DeadlineSocket, deadline_s: float) -> Any:
        num_bytes = 0
        while (reply := self._reader.gets(False)) is _NOT_ENOUGH:
            if num_bytes > _MAX_REPLY_BYTES:
                raise InvalidResponse(f"a reply of more than {_MAX_REPLY_BYTES} bytes")
            received = sock.receive(self._buffer, deadline_s)
            self._reader.feed(self._buffer, 0, received)
            num_bytes += received
        return reply

    def _read_string(self, sock: DeadlineSocket, header: memoryview, into: memoryview, deadline_s: float) -> Fetched:
        """The reply to GET. It is received where it belongs if it is the right one, which its first line tells."""
        wanted = b"$%d\r\n" % (len(header) + len(into))
        head, tail = memoryview(bytearray(len(wanted) + len(header))), memoryview(bytearray(2))
        places = [head, into, tail]
        num_bytes = sock.receive_some(places, deadline_s)
        while not (line := _line(head[:num_bytes])):
            if num_bytes >= len(head):
                raise InvalidResponse(f"no reply to GET: {bytes(head[:64])!r}")
            num_bytes += sock.receive(head[num_bytes:], deadline_s)
        if line == wanted:
            sock.receive_all(behind(places, num_bytes), deadline_s)
            header[:] = head[len(wanted) :]
            if bytes(tail) != b"\r\n":
                raise InvalidResponse("a string does not end where it should")
            return Fetched.HIT
        if line.startswith(b"$") and line[1:-2].isdigit():
            self.close()  # a string of another length is on its way; nobody wants to wait for it
            return Fetched.BAD
        if num_bytes > len(line):
            raise InvalidResponse(f"more than a reply to GET: {bytes(head[:64])!r}")
        if line == b"$-1\r\n":
            return Fetched.ABSENT
        if line.startswith(b"-WRONGTYPE"):
            return Fetched.BAD
        if line.startswith(b"-"):
            raise ResponseError(line[1:-2].decode("utf-8", "replace"))
        raise InvalidResponse(f"no reply to GET: {line[:64]!r}")


def connection_pool(url: str, timeout_s: float) -> Any:
    """Where connections come from; none is opened.

    Args:
        url: redis://, rediss:// or unix://, with user, password, database and options of the library.
        timeout_s: to connect, and for each answer of a TLS handshake.

    Raises:
        StartupError: url is none. The message does not repeat it: it may hold a password.
    """
    try:
        pool = redis.ConnectionPool.from_url(
            url,
            socket_connect_timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_read_size=_READ_BYTES,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=lambda connection: None,
        )
        pool.make_connection()
    except (ValueError, TypeError, redis.RedisError) as error:
        raise StartupError(f"--redis-url: {error}; expected redis://HOST:PORT, rediss://HOST:PORT or unix://PATH") from error
    return pool


def _handshake(library: Any) -> list[tuple[bytes, ...]]:
    """What a new connection says first."""
    commands: list[tuple[bytes, ...]] = []
    if library.username or library.password:
        user = (library.username.encode(),) if library.username else ()
        commands.append((b"AUTH", *user, (library.password or "").encode()))
    if library.db:
        commands.append((b"SELECT", b"%d" % library.db))
    return commands


def _line(data: memoryview) -> bytes:
    """The first line of a reply, with its end; empty: it has none yet."""
    found = bytes(data)
    end = found.find(b"\r\n")
    return found[: end + 2] if end > 0 else b""


def _pack(commands: Sequence[Sequence[bytes]]) -> bytes:
    return b"".join(hiredis.pack_command(cast(Any, tuple(command))) for command in commands)


def _new_reader() -> Any:
    return hiredis.Reader(protocolError=InvalidResponse, replyError=ResponseError, notEnoughData=_NOT_ENOUGH)
