"""Executors die and return, clients leave, blocks go to the store and back, all at once: who stays gets exactly its tokens."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.integration.scheduler_svc.conftest import Serve, Served, stream_tokens, tokens_request, until
from tests.integration.scheduler_svc.fake_executor import continuation


async def client(served: Served, rng: random.Random, shared: list[int]) -> None:
    prompt = shared[: rng.randrange(1, len(shared))] + [rng.randrange(1, 91) for _ in range(rng.randrange(1, 12))]
    max_tokens = rng.randrange(1, 40)
    call = asyncio.create_task(stream_tokens(served, tokens_request(prompt, max_tokens, n=rng.choice([1, 1, 3]))))
    if rng.random() < 0.25:
        await until(lambda: rng.random() < 0.02 or call.done())
        call.cancel()
        await asyncio.wait([call])
    else:
        assert await call == continuation(prompt, max_tokens)


async def killer(served: Served, rng: random.Random) -> None:
    for _ in range(4):
        process = rng.choice(served.executors)
        num_steps = process.executor.num_steps + rng.randrange(5, 30)
        await until(lambda: process.executor.num_steps >= num_steps or rng.random() < 0.002)  # noqa: B023
        await process.kill()
        served.check_integrity()
        await process.start()


@pytest.mark.parametrize("seed", range(3))
async def test_everybody_who_stays_gets_its_tokens(serve: Serve, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(1, 91) for _ in range(30)]
    info = {"num_blocks": 60, "max_num_seqs": 6, "max_num_batched_tokens": 24, "kv_transport": "shm"}
    store = f"unix:{tmp_path}/executor-0.sock"  # dies with its executor
    async with serve(num_executors=2, info=info, kvstore=store, max_chunk_tokens=8) as served:
        served.executors[1].executor.stored = served.fake.stored
        await until(lambda: all(driver.is_connected for driver in served.app.engine.drivers))
        killing = asyncio.create_task(killer(served, random.Random(seed + 100)))
        await asyncio.gather(*(client(served, random.Random(1000 * seed + i), shared) for i in range(60)))
        await killing
        await until(lambda: served.app.engine.num_open_requests == 0)
        served.check_integrity()
        for driver in served.app.engine.drivers:
            assert driver.stats().num_used_blocks == 0
