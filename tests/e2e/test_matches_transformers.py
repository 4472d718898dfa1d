"""Greedy tokens in fp32 equal transformers' generate, token for token, whatever the history of batch, chunks and cache."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2_grpc
from tests.e2e.conftest import MAX_TOKENS
from tests.e2e.stack import Answer, Stack, StackConfig, collect, greedy_request, running_stack

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

NO_CACHE = ("--no-prefix-caching",)
Tokens = list[list[int]]


def ask_one_by_one(stack: Stack, prompts: Tokens) -> list[Answer]:
    with stack.channel() as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        return [collect(stub, greedy_request(prompt, MAX_TOKENS)) for prompt in prompts]


def ask_all_at_once(stack: Stack, prompts: Tokens, expected: Tokens, *, n: int = 1) -> list[Answer]:
    """As many tokens of each prompt as are expected."""
    with stack.channel() as channel, ThreadPoolExecutor(len(prompts)) as pool:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        requests = [greedy_request(prompt, len(tokens), n=n) for prompt, tokens in zip(prompts, expected, strict=True)]
        return list(pool.map(lambda request: collect(stub, request), requests))


def check(answers: list[Answer], expected: Tokens) -> None:
    wrong = [
        i for i, (answer, tokens) in enumerate(zip(answers, expected, strict=True)) if any(t != tokens for t in answer.token_ids)
    ]
    assert not wrong, f"prompts {wrong} differ; first: {answers[wrong[0]].token_ids} instead of {expected[wrong[0]]}"


def num_preemptions(stack: Stack) -> int:
    with stack.channel() as channel:
        load = admin_service_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_service_pb2.GetLoadRequest(), timeout=5).load
    return load.num_preemptions


def flush_device(stack: Stack) -> int:
    with stack.channel() as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        return admin.FlushCache(admin_service_pb2.FlushCacheRequest(), timeout=5).num_device_blocks


def test_matches_transformers_one_by_one_cold_then_warm_then_from_the_store(
    model_folder: Path, prompts: Tokens, expected: Tokens
) -> None:
    """(a) one by one with a cold prefix cache, (d) again warm, (f) again after the device pool was cleared.

    With one thread: the store answers in time only if it has a core to do so, and what is late is computed.
    """
    config = StackConfig(model_folder, num_threads=1, store_flags=("--capacity-bytes", str(3 << 30)))
    with running_stack(config) as stack:
        cold = ask_one_by_one(stack, prompts)
        check(cold, expected)

        warm = ask_one_by_one(stack, prompts)
        check(warm, expected)
        assert all(
            a.usage.cached_tokens_by_tier["device"] >= len(p) - 16 for a, p in zip(warm, prompts, strict=True) if len(p) > 32
        )

        # What is late is computed instead, and a busy machine makes much of it late: several times, until most came in time.
        from_store = 0
        for _ in range(3):
            assert flush_device(stack) > 0
            restored = ask_one_by_one(stack, prompts)
            check(restored, expected)
            from_store = sum(a.usage.cached_tokens_by_tier["shm"] for a in restored)
            if from_store > 0.5 * sum(len(p) for p in prompts):
                break
        assert from_store > 0.5 * sum(len(p) for p in prompts), "most prompt tokens should have come from the store"


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_matches_transformers_all_at_once(model_folder: Path, prompts: Tokens, expected: Tokens, transport: str) -> None:
    """(b) all at once; and (d) all at once again, warm; with plans by the line and by gRPC."""
    with running_stack(StackConfig(model_folder, scheduler_flags=("--executor-transport", transport))) as stack:
        check(ask_all_at_once(stack, prompts, expected), expected)
        check(ask_all_at_once(stack, prompts, expected), expected)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_matches_transformers_in_chunks(model_folder: Path, prompts: Tokens, expected: Tokens, chunk: int) -> None:
    """(c) prompts computed in chunks of 1, 7 and 64 tokens, all requests in one batch."""
    config = StackConfig(model_folder, scheduler_flags=("--max-chunk-tokens", str(chunk), *NO_CACHE), with_store=False)
    with running_stack(config) as stack:
        check(ask_all_at_once(stack, prompts, expected), expected)


def test_matches_transformers_under_preemption(model_folder: Path, prompts: Tokens, expected_long: Tokens) -> None:
    """(e) so few blocks that requests are preempted and recomputed."""
    config = StackConfig(model_folder, executor_flags=("--num-blocks", "72"), scheduler_flags=NO_CACHE, with_store=False)
    with running_stack(config) as stack:
        check(ask_all_at_once(stack, prompts, expected_long), expected_long)
        assert num_preemptions(stack) > 0


def test_matches_transformers_with_four_samples(model_folder: Path, prompts: Tokens, expected: Tokens) -> None:
    """(g) n = 4 samples at temperature 0 are all the greedy answer."""
    with running_stack(StackConfig(model_folder, with_store=False)) as stack:
        check(ask_all_at_once(stack, prompts, expected, n=4), expected)
