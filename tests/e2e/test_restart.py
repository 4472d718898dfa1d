"""All services stopped and started again: what was on disk is used, and the tokens are those of no cache."""

import time
from pathlib import Path

import pytest

from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc
from tests.e2e.stack import Stack, StackConfig, running_stack
from tests.e2e.test_matches_transformers import Tokens, ask_one_by_one, check

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

ASKED = (9, 14, 18, 20, 22, 24, 25)
"""Of the 64 prompts: 33 to 513 tokens."""


def disk(stack: Stack) -> admin_service_pb2.TierLoad:
    with stack.channel() as channel:
        load = admin_service_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_service_pb2.GetLoadRequest(), timeout=10).load
    return next(tier for tier in load.tiers if tier.tier == "disk")


def wait_for_blocks(stack: Stack, num_blocks: int) -> None:
    deadline = time.monotonic() + 60
    while disk(stack).num_blocks < num_blocks:
        assert time.monotonic() < deadline, f"the blocks never reached the disk: {disk(stack)}"
        time.sleep(0.05)


def test_a_disk_hit_after_a_restart_of_everything_gives_the_same_tokens(
    model_folder: Path, prompts: Tokens, expected: Tokens
) -> None:
    chosen, wanted = [prompts[i] for i in ASKED], [expected[i] for i in ASKED]
    num_blocks = sum((len(prompt) - 1) // 16 for prompt in chosen)
    with running_stack(StackConfig(model_folder)) as stack:
        for _ in range(2):  # the second use is what brings blocks down, though the device has them all
            check(ask_one_by_one(stack, chosen), wanted)
        wait_for_blocks(stack, num_blocks)
        assert set(stack.stop().values()) == {0}
        stack.start()

        answers = ask_one_by_one(stack, chosen)

        check(answers, wanted)
        from_disk = sum(answer.usage.cached_tokens_by_tier["disk"] for answer in answers)
        assert from_disk > 0.5 * sum(map(len, chosen)), "most prompt tokens should have come from the disk"
