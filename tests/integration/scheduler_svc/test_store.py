"""Blocks that go to the store and come back: the same tokens, fewer computed; a store that fails is a miss."""

from pathlib import Path

from octavo.scheduler.v1 import admin_service_pb2 as admin_pb
from tests.integration.scheduler_svc.conftest import Serve, tokens_request, until
from tests.integration.scheduler_svc.fake_executor import continuation

PROMPT = list(range(1, 30))
WITH_STORE = {"kv_transport": "shm"}


async def test_blocks_come_back_from_the_store_after_the_device_forgot_them(serve: Serve, tmp_path: Path) -> None:
    async with serve(info=WITH_STORE, kvstore=f"unix:{tmp_path}/executor-0.sock") as served:
        await served.inference.Generate(tokens_request(PROMPT, 10))
        await until(lambda: len(served.fake.stored) == (len(PROMPT) + 9) // 4)
        flushed = await served.admin.FlushCache(admin_pb.FlushCacheRequest())
        assert flushed.num_device_blocks > 0
        answer = await served.inference.Generate(tokens_request(PROMPT, 10))
        assert list(answer.outputs[0].token_ids) == continuation(PROMPT, 10)
        assert dict(answer.usage.cached_tokens_by_tier) == {"shm": 28}
        assert (await served.load()).tiers[0].num_blocks == len(served.fake.stored)
        served.check_integrity()
        flushed = await served.admin.FlushCache(admin_pb.FlushCacheRequest(include_store=True))
        assert flushed.num_store_blocks > 0 and not served.fake.stored


async def test_blocks_that_vanish_between_look_up_and_load_are_computed(serve: Serve, tmp_path: Path) -> None:
    async with serve(info=WITH_STORE, kvstore=f"unix:{tmp_path}/executor-0.sock") as served:
        await served.inference.Generate(tokens_request(PROMPT, 10))
        await until(lambda: len(served.fake.stored) == (len(PROMPT) + 9) // 4)
        await served.admin.FlushCache(admin_pb.FlushCacheRequest())
        served.fake.forget_before_load = 3
        answer = await served.inference.Generate(tokens_request(PROMPT, 10))
        assert list(answer.outputs[0].token_ids) == continuation(PROMPT, 10)
        assert dict(answer.usage.cached_tokens_by_tier) == {"shm": 12}
        assert (await served.load()).degraded["store_load_incomplete"] == 1
        served.check_integrity()


async def test_a_dead_store_is_a_miss_and_counted(serve: Serve, tmp_path: Path) -> None:
    async with serve(info=WITH_STORE, kvstore=f"unix:{tmp_path}/nobody.sock") as served:
        answer = await served.inference.Generate(tokens_request(PROMPT, 10))
        assert list(answer.outputs[0].token_ids) == continuation(PROMPT, 10)
        load = await served.load()
        assert load.degraded["kvstore_unavailable"] >= 1
        info = await served.admin.GetServerInfo(admin_pb.GetServerInfoRequest())
        assert not info.kvstore.connected and info.kvstore.reason


async def test_a_prefix_is_sought_where_it_is(serve: Serve) -> None:
    async with serve(num_executors=2) as served:
        first, second = served.app.engine.drivers
        await until(lambda: first.is_connected and second.is_connected)
        prompts = [[i, *PROMPT] for i in range(1, 5)]
        for _ in range(3):
            for prompt in prompts:
                answer = await served.inference.Generate(tokens_request(prompt, 4))
        assert answer.usage.cached_tokens == 28
        assert (await served.load()).num_cached_tokens == 28 * 8
