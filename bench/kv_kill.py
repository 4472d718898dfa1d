"""Kills the block store again and again while it writes, and flips bits below it: what was durable is there, nothing wrong.

    python -m bench.kv_kill [--kills 200] [--seed 1] [--folder FOLDER]

The store is the real process. A client writes blocks, looks some up, reads some, and has some made durable
(KvStoreAdminService.PersistBlocks). At a random moment the store gets SIGKILL. In some rounds random bits of its segment
files or of its index are flipped before it starts again; those of values in Redis in all rounds that have one. Then every durable
block is read, but those whose slot was hit, and others at random. Three stores take turns: one with room, where what is durable
has to stay; one that is so small that blocks are evicted all the time, where only wrong bytes count; one that has a real Redis
below it: what that has and was not hit has to come back. Now and then everything is dropped, and has to stay dropped.

Prints a table and JSON lines; the exit status is 1 if anything was wrong, lost or leaked.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.figures import Figures
from bench.kv_load import Load, Promises, Wrong, key, read
from bench.kv_redis_damage import DamagedRedis
from kvstore_svc.core.disk_record import RECORD_BYTES, DiskRecord
from kvstore_svc.tiers.disk_segment import find_segments
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.store_process import MIB, StoreProcess

# A machine that is busy is neither a slow disk nor a slow Redis, see _PATIENT.
_FLAGS = (
    *("--disk-segment-bytes", str(4 * MIB), "--capacity-bytes", str(16 * MIB), "--slab-bytes", str(16 * MIB)),
    *("--disk-deadline-s", "20"),
)
_LONGEST_LIFE_S = 0.4
_MAX_DURABLE = 600
_NUM_FLIPS = 3
_SAY_EVERY = 50
_PATIENT = ("--redis-deadline-s", "10", "--redis-timeout-s", "10", "--redis-lookup-timeout-s", "10", "--redis-off-s", "0.2")
FILES = {"lock", "format", "index"}


@dataclass
class Outcome:
    """What was seen.

    Attributes:
        counts: of all rounds.
        problems: sentences; none is what is wanted.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Arena:
    """One folder, its store and what was promised there."""

    def __init__(self, name: str, folder: Path, capacity_bytes: int, rng: random.Random, redis: DamagedRedis | None = None):
        folder.mkdir(parents=True)
        self.name = name
        self.is_roomy = capacity_bytes >= 64 * MIB
        self._capacity_bytes = capacity_bytes
        self._random = rng
        self._promises = Promises()
        self._hit: set[int] = set()
        self._next_number = 1
        self._num_fds = 0
        self._redis = redis
        flags = (*_PATIENT, "--redis-url", redis.url) if redis is not None else ()
        self.store = StoreProcess(folder, *_FLAGS, "--disk-capacity-bytes", str(capacity_bytes), *flags)

    def round(self, outcome: Outcome) -> None:
        """Load, death, damage, a new life, and a look at everything."""
        load = Load(self.store, self._promises, self._next_number, self._random.getrandbits(32))
        load.start()
        load.has_begun.wait()
        time.sleep(self._random.random() * _LONGEST_LIFE_S)  # the random moment is what this is about
        self.store.kill()
        load.join()
        self._next_number = load.next_number
        if load.error is not None:
            outcome.problems.append(f"{self.name}: {type(load.error).__name__}: {load.error}")
        if self._random.random() < 0.3:
            self._flip(outcome)
        self._flip_in_redis(outcome)
        self.store.restart()
        self.store.wait_ready()
        self.store.reconnect()
        self._look(outcome)
        outcome.counts["kills"] += 1

    def _look(self, outcome: Outcome) -> None:
        promises = self._promises
        wanted = promises.durable - self._hit if self.is_roomy else set()
        others = sorted(promises.written - wanted)
        numbers = sorted(wanted) + self._random.sample(others, min(40, len(others)))
        below = self._sample_of_redis()
        numbers += below
        try:
            found = read(self.store, numbers, promises)
        except Wrong as error:
            outcome.problems.append(f"{self.name}: wrong bytes: {error}")
            return
        outcome.counts["durable blocks read"] += len(wanted & found)
        outcome.counts["other blocks read"] += len(found - wanted)
        if self._redis is not None:
            self._look_at_redis(outcome, self._redis, found, below)
        if wanted - found:
            outcome.problems.append(f"{self.name}: {len(wanted - found)} of {len(wanted)} durable blocks are gone")
            promises.durable &= found
        dropped = self._random.sample(sorted(promises.dropped), min(40, len(promises.dropped)))
        back = [n for n in dropped if self.store.stub.LookupBlocks(pb.LookupBlocksRequest(keys=[key(n)]), timeout=20).tiers]
        if back:
            outcome.problems.append(f"{self.name}: {len(back)} dropped blocks came back")
        self._look_for_leaks(outcome)
        if len(promises.durable) > _MAX_DURABLE:
            self.store.stub.ClearBlocks(pb.ClearBlocksRequest(), timeout=20)
            promises.forget()
            self._hit.clear()
            outcome.counts["drops of everything"] += 1

    def _sample_of_redis(self) -> list[int]:
        """Blocks that Redis has, of those that were hit as many as there are."""
        if self._redis is None:
            return []
        there = self._redis.numbers()
        return sorted({*self._random.sample(there, min(40, len(there))), *(self._redis.hit & set(there))})

    def _look_at_redis(self, outcome: Outcome, redis: DamagedRedis, found: set[int], below: list[int]) -> None:
        """What it has comes back, unless it was hit: then the store has removed it, as soon as it was read from there."""
        whole = set(below) - redis.hit
        outcome.counts["blocks of Redis read"] += len(whole & found)
        outcome.counts["hit blocks of Redis read"] += len(set(below) & redis.hit)
        if whole - found:
            outcome.problems.append(f"{self.name}: {len(whole - found)} of {len(whole)} blocks that Redis has do not come")

    def _look_for_leaks(self, outcome: Outcome) -> None:
        process = psutil.Process(self.store.process.pid)
        files = {path.name for path in self.store.disk_dir.iterdir() if path.suffix != ".kv"}
        segments = find_segments(self.store.disk_dir)
        if files != FILES:
            outcome.problems.append(f"{self.name}: files left behind: {sorted(files - FILES)}")
        if sum(path.stat().st_size for path, _, _ in segments) > self._capacity_bytes:
            outcome.problems.append(f"{self.name}: {len(segments)} segments are more than the capacity")
        num_fds = process.num_fds() - len(segments)
        self._num_fds = self._num_fds or num_fds
        if num_fds > self._num_fds + 8:
            outcome.problems.append(f"{self.name}: {num_fds} descriptors, {self._num_fds} after the first start")
        outcome.counts["leaks looked for"] += 1

    def _flip(self, outcome: Outcome) -> None:
        """Flips single bits; remembers whose block that may have been."""
        segments = find_segments(self.store.disk_dir)
        index = self.store.disk_dir / "index"
        for _ in range(_NUM_FLIPS):
            if self._random.random() < 0.2 and index.stat().st_size:
                _flip_bit(index, self._random.randrange(index.stat().st_size), self._random)
                outcome.counts["bits flipped in the index"] += 1
            elif segments:
                path, _, slot_bytes = self._random.choice(segments)
                at = self._random.randrange(path.stat().st_size)
                with path.open("rb") as file:
                    file.seek(at // slot_bytes * slot_bytes)
                    record = DiskRecord.unpack(file.read(RECORD_BYTES))
                if record is not None:
                    self._hit.add(int.from_bytes(record.key, "big"))
                _flip_bit(path, at, self._random)
                outcome.counts["bits flipped in segments"] += 1

    def _flip_in_redis(self, outcome: Outcome) -> None:
        if self._redis is not None:
            outcome.counts["bits flipped in Redis values"] += sum(self._redis.flip() for _ in range(_NUM_FLIPS))

    def close(self) -> None:
        """Ends the store."""
        self.store.close()


def _flip_bit(path: Path, at: int, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1 << rng.randrange(8)]))


def run(folder: Path, num_kills: int, seed: int) -> Outcome:
    """All rounds."""
    rng = random.Random(seed)
    outcome = Outcome()
    own = psutil.Process()
    with (
        closing(DamagedRedis(folder / "valkey", rng)) as redis,
        closing(Arena("roomy", folder / "roomy", 256 * MIB, rng)) as roomy,
        closing(Arena("small", folder / "small", 8 * MIB, rng)) as small,
        closing(Arena("redis", folder / "redis", 8 * MIB, rng, redis)) as shared,
    ):
        num_fds = 0
        for number in range(num_kills):
            (roomy, shared, roomy, small)[number % 4].round(outcome)
            num_fds = num_fds or own.num_fds()
            if outcome.counts["kills"] % _SAY_EVERY == 0:
                print(f"{outcome.counts['kills']} kills", *outcome.problems, sep="; ", file=sys.stderr, flush=True)
        if own.num_fds() > num_fds + 8:
            outcome.problems.append(f"the client has {own.num_fds()} descriptors, {num_fds} after the first round")
    left = [child for child in own.children(recursive=True) if "kvstore_svc" in " ".join(child.cmdline())]
    if left:
        outcome.problems.append(f"{len(left)} processes are left")
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="an empty one on the disk to be tested")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octavo-kill-", dir=options.folder) as folder:
        outcome = run(Path(folder), options.kills, options.seed)
    figures = Figures()
    for name, count in outcome.counts.items():
        figures.add("kv kill", name, count, "", "octavo")
    figures.add("kv kill", "problems", len(outcome.problems), "", "octavo")
    figures.print_table()
    for problem in outcome.problems:
        print(problem)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
