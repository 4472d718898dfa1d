"""A real model above a real Redis: what one host computed, another that starts afterwards loads, with the same tokens."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2_grpc
from tests.e2e.stack import Stack, StackConfig, collect, greedy_request, running_stack
from tests.integration.kvstore_svc.redis_server import RedisServer

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

ASKED = (25,)
"""Of the 64 prompts: one of 513 tokens."""
BLOCK_TOKENS = 16


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with closing(RedisServer(tmp_path)) as server:
        yield server


def cached_tokens(stack: Stack) -> dict[str, int]:
    """By tier."""
    with stack.channel() as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        return dict(stub.GetLoad(admin_service_pb2.GetLoadRequest(), timeout=10).load.cached_tokens_by_tier)


def answers(stack: Stack, prompts: list[list[int]], expected: list[list[int]]) -> list[list[list[int]]]:
    with stack.channel() as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        return [collect(stub, greedy_request(prompts[i], len(expected[i]))).token_ids for i in ASKED]


def test_a_host_that_starts_later_uses_what_another_computed(
    model_folder: Path, prompts: list[list[int]], expected_long: list[list[int]], redis: RedisServer
) -> None:
    # However slow this machine is: a load that is late would be computed, and show nothing.
    patient = ("--redis-timeout-s", "10", "--redis-lookup-timeout-s", "2")
    config = StackConfig(
        model_folder,
        store_flags=("--redis-url", redis.url, *patient),
        scheduler_flags=("--store-lookup-timeout-s", "2", "--store-load-timeout-s", "10"),
    )
    num_blocks = sum(len(prompts[i]) // BLOCK_TOKENS for i in ASKED)
    expected = [[expected_long[i]] for i in ASKED]
    with running_stack(config) as stack:
        assert answers(stack, prompts, expected_long) == expected
        deadline = time.monotonic() + 60
        while redis.client.dbsize() < num_blocks:
            assert time.monotonic() < deadline, f"{redis.client.dbsize()} of {num_blocks} blocks are in Redis"
            time.sleep(0.05)

    with running_stack(config) as stack:
        assert answers(stack, prompts, expected_long) == expected
        assert cached_tokens(stack).get("redis", 0) >= BLOCK_TOKENS * num_blocks // 2
