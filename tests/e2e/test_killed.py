"""Real processes of a real model, killed under load: clients see a pause, and the tokens of an undisturbed run."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2_grpc
from tests.e2e.stack import Stack, StackConfig, collect, greedy_request, running_stack

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

ASKED = (0, 5, 13, 17, 18, 20, 25, 26, 40)
"""Of the 64 prompts: 1, 15, 48, 127, 128, 255, 513, 900 and some hundred tokens."""


def load(stack: Stack) -> admin_service_pb2.Load:
    with stack.channel() as channel:
        return admin_service_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_service_pb2.GetLoadRequest(), timeout=10).load


def kill_and_start_again(stack: Stack, name: str) -> None:
    process = stack.processes[name].popen
    process.kill()
    process.wait()
    if name == "kvstore":
        stack.start_store()
    else:
        stack.start_executor(0)


@pytest.mark.parametrize("victim", ["executor-0", "kvstore"])
def test_killed_under_load(model_folder: Path, prompts: list[list[int]], expected_long: list[list[int]], victim: str) -> None:
    """Twice in the middle of prompts and outputs; the second time much of the prompts is cached here or there."""
    requests = [greedy_request(prompts[i], len(expected_long[i])) for i in ASKED]
    with running_stack(StackConfig(model_folder)) as stack, stack.channel() as channel, ThreadPoolExecutor(len(ASKED)) as pool:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(2):
            num_steps = load(stack).executors[0].num_steps
            answers = [pool.submit(collect, stub, request) for request in requests]
            deadline = time.monotonic() + 60
            while (now := load(stack)).executors[0].num_steps < num_steps + 3 or now.num_running_requests < len(ASKED) // 2:
                assert time.monotonic() < deadline, f"the requests never ran: {now}"
                time.sleep(0.005)
            kill_and_start_again(stack, victim)
            for i, answer in zip(ASKED, answers, strict=True):
                assert answer.result().token_ids == [expected_long[i]], f"prompt {i}"
        after = load(stack)
        assert after.num_failed_requests == 0
        if victim == "executor-0":
            assert after.degraded["executor_unavailable"] > 0
        assert all(process.popen.poll() is None for process in stack.processes.values())
