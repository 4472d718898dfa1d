"""Where a prompt's blocks come from, and how fast, changes nothing about its answer."""

from pathlib import Path

from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc
from tests.e2e.reference import Reference
from tests.e2e.stack import Stack, StackConfig, running_stack

_NUM_TOKENS = 8
_MAX_TRIES = 12


def test_hits_from_every_tier_at_any_speed_and_after_a_restart_give_the_same_tokens(
    model_folder: Path, prompts: list[list[int]], reference: Reference, tmp_path: Path
) -> None:
    chosen = sorted(prompts, key=len)[-3:]  # 5 % of the time to compute a short one is too little for a load
    disk = ("--disk-dir", str(tmp_path), "--disk-capacity-bytes", str(1 << 30), "--disk-admission-touches", "1")
    # Blocks that come up before their turn would count as shared memory's.
    off = ("--prewarm-share", "0")
    config = StackConfig(model_folder, scheduler_flags=off, store_flags=(*disk, "--capacity-bytes", str(128 << 20)))
    with running_stack(config) as stack:
        cold = answers(stack, chosen)
        assert cold == [reference.generate(prompt, _NUM_TOKENS) for prompt in chosen], "as transformers computes them"
        assert answers(stack, chosen) == cold, "from the device"
        stack.wait_disk_blocks(sum((len(prompt) - 1) // 16 for prompt in chosen))
        stack.flush_device()
        assert answers(stack, chosen) == cold, "from shared memory"
        for bytes_per_s in (2e6, 2e8):
            stack.restart_store(("--throttle", f"disk={bytes_per_s}:0.001"))
            stack.flush_device()
            assert answers(stack, chosen) == cold, f"with a disk of {bytes_per_s:g} bytes/s"
        until_read_from_disk(stack, chosen, cold)
    with running_stack(config) as stack:
        assert answers(stack, chosen) == cold, "after a restart of everything"
        until_read_from_disk(stack, chosen, cold)


def answers(stack: Stack, prompts: list[list[int]]) -> list[list[int]]:
    return [stack.ask(prompt, _NUM_TOKENS).token_ids[0] for prompt in prompts]


def until_read_from_disk(stack: Stack, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Asks again and again, always with an empty device and empty shared memory: a fast disk is found to be fast in the end."""
    for _ in range(_MAX_TRIES):
        with stack.channel() as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)
            load = admin.GetLoad(admin_service_pb2.GetLoadRequest(), timeout=10).load
        if load.cached_tokens_by_tier.get("disk", 0) > 0:
            return
        stack.restart_store()
        stack.flush_device()
        assert answers(stack, prompts) == expected
    raise AssertionError(f"nothing came from the disk: {load}")
