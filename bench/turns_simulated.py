"""Chats that come back, in virtual time: what a block store of given speeds is worth, decided by the production scheduler.

    python -m bench.turns_simulated        turns 48:5:12 on an H200's step times, device pool of 160,000 tokens

Knows rates and step times; copies nothing and computes nothing. Stores are as fast as they are told: not at all, as measured once
before transfers were mended, and as copies run over the link.
"""

import argparse
import asyncio
import json
import statistics
from dataclasses import dataclass, replace

from bench import workloads
from bench.simulated_store import SimulatedStore, StoringExecutor
from common.block_hash import root_key
from common.degraded import DegradedPaths
from common.ids import RequestId
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.engine import Engine
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.device import SimulatedExecutor
from scheduler_svc.simulation.outcome import Served
from scheduler_svc.simulation.output import TimedOutput
from scheduler_svc.simulation.profile import PROFILES, DeviceProfile
from scheduler_svc.simulation.virtual_time import VirtualTimeLoop

_ROOT = root_key(b"s" * 32)


@dataclass(frozen=True)
class StoreSpeed:
    """Of a block store.

    Attributes:
        load_bytes_per_s, save_bytes_per_s: to and from the device; no load at all: 0.
        lookup_s: that an answer takes.
    """

    name: str
    load_bytes_per_s: float
    save_bytes_per_s: float
    lookup_s: float = 0.002


SPEEDS = (
    StoreSpeed("no store", 0.0, 1e9),
    StoreSpeed("load 28.7, save 3.0 GB/s", 28.7e9, 3.0e9),
    StoreSpeed("load 5, save 5 GB/s", 5e9, 5e9),
    StoreSpeed("load 50, save 18 GB/s", 50e9, 18e9),
)


class Chats:
    """The conversations while they run.

    Attributes:
        first_token_s: times to first token by turn.
    """

    def __init__(self, engine: Engine, turns: workloads.Turns, loop: VirtualTimeLoop):
        self.first_token_s: list[list[float]] = [[] for _ in turns.conversations[0].new_token_ids]
        self._engine = engine
        self._turns = turns
        self._loop = loop
        self._histories: list[list[int]] = [[] for _ in turns.conversations]
        self._users = [asyncio.Lock() for _ in turns.conversations]
        self._places = asyncio.Semaphore(turns.num_in_flight)

    async def run(self) -> None:
        """To the last answer, in the order of bench.client."""
        tasks = []
        for turn in range(len(self.first_token_s)):
            for user in range(len(self._histories)):
                await self._places.acquire()
                tasks.append(asyncio.create_task(self._answer(turn, user)))
        await asyncio.gather(*tasks)

    async def _answer(self, turn: int, user: int) -> None:
        async with self._users[user]:
            history, num_output = self._histories[user], self._turns.num_output_tokens
            history += self._turns.conversations[user].new_token_ids[turn]
            prompt, ended = tuple(history), asyncio.Event()
            served = Served(Arrival(self._loop.time(), len(prompt), num_output, lambda: prompt))
            output = TimedOutput(served, self._loop, ended.set)
            request = Request(
                request_id=RequestId(f"{turn} {user}"),
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0),
                stop=StopConditions(num_output),
                root_key=_ROOT,
                arrival_s=served.arrival.at_s,
            )
            await self._engine.submit(request, output)
            await ended.wait()
            assert served.ttft_s is not None and not served.error, served.error
            self.first_token_s[turn].append(served.ttft_s)
            history += [7] * num_output
        self._places.release()


async def run(turns: workloads.Turns, profile: DeviceProfile, speed: StoreSpeed) -> dict[str, float | str]:
    """One run; its figures."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop), "time has to be virtual"
    store = SimulatedStore(speed.lookup_s)
    rates = {"load_bytes_per_s": speed.load_bytes_per_s, "save_bytes_per_s": speed.save_bytes_per_s}
    has_store = speed.load_bytes_per_s > 0
    executor = StoringExecutor(profile, 0, 0, store, **rates) if has_store else SimulatedExecutor(profile, 0, 0)
    engine = Engine([executor], EngineConfig(), loop, store, DegradedPaths())
    await engine.start()
    await engine.served_model()
    chats, began_s = Chats(engine, turns, loop), loop.time()
    await chats.run()
    total_s = loop.time() - began_s
    counters = engine.counters
    await engine.stop()
    later = [1e3 * s for of_turn in chats.first_token_s[1:] for s in of_turn]
    return {
        "store": speed.name,
        "total s": round(total_s, 2),
        "later first token ms, mean": round(statistics.fmean(later), 1),
        "p50": round(statistics.median(later), 1),
        "max": round(max(later), 1),
        "blocks loaded": store.num_loaded,
        "prompt tokens": counters.num_prompt_tokens,
        "of them from device": counters.cached_tokens_by_tier.get("device", 0),
        "from shm": counters.cached_tokens_by_tier.get("shm", 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", default="48:5:12", help="users : turns : in flight")
    parser.add_argument("--num-blocks", type=int, default=10_000, help="of the device's pool")
    options = parser.parse_args()
    turns = workloads.turns(*(int(part) for part in options.turns.split(":")))
    profile = replace(PROFILES["h200-llama-8b"], num_blocks=options.num_blocks)
    for speed in SPEEDS:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            print(json.dumps(runner.run(run(turns, profile, speed))), flush=True)


if __name__ == "__main__":
    main()
