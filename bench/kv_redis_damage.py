"""A Redis whose values lose bits. Knows keys that are numbers, values and one server; not who reads them."""

import random
from pathlib import Path

from kvstore_svc.tiers.redis_value import KEY_PREFIX
from tests.integration.kvstore_svc.redis_server import RedisServer

_MAX_MEMORY_MIB = 24


class DamagedRedis:
    """A real server with little memory, so that it evicts all the time.

    Attributes:
        url: where it listens.
        hit: numbers of the blocks whose value is not what it was.
    """

    def __init__(self, folder: Path, rng: random.Random):
        folder.mkdir()
        self._server = RedisServer(folder, "--maxmemory", f"{_MAX_MEMORY_MIB}mb", "--maxmemory-policy", "allkeys-lru")
        self._random = rng
        self.url = self._server.url
        self.hit: set[int] = set()

    def numbers(self) -> list[int]:
        """Of the blocks that it has."""
        return sorted(int(name.removeprefix(KEY_PREFIX), 16) for name in self._server.names())

    def flip(self) -> bool:
        """Flips one bit anywhere in a value; False: there is none."""
        name = self._server.client.randomkey()
        if name is None:
            return False
        at = self._random.randrange(self._server.client.strlen(name))
        (value,) = self._server.client.getrange(name, at, at)
        self._server.client.setrange(name, at, bytes([value ^ 1 << self._random.randrange(8)]))
        self.hit.add(int(name.removeprefix(KEY_PREFIX), 16))
        return True

    def close(self) -> None:
        """Ends the server."""
        self._server.close()
