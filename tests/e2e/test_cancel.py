"""A client that vanishes, in whatever phase, costs nobody else anything and gives its blocks back within a step."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2_grpc
from tests.e2e.stack import Stack, StackConfig, collect, greedy_request, running_stack

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

# A client of its own process: it asks, says when the phase is reached, and waits to be killed.
_CLIENT = """
import sys, grpc
from octavo.scheduler.v1 import inference_service_pb2_grpc
from tests.e2e.stack import greedy_request
target, num_prompt, phase = sys.argv[1], int(sys.argv[2]), sys.argv[3]
stub = inference_service_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(target))
prompt = [10 + (i * 7919) % 20000 for i in range(num_prompt)]
stream = stub.StreamGenerate(greedy_request(prompt, 1000, request_id="victim-" + phase), timeout=600)
print("sent", flush=True)
for response in stream:
    print("token", flush=True)
"""


def load(stack: Stack) -> admin_service_pb2.Load:
    with stack.channel() as channel:
        return admin_service_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_service_pb2.GetLoadRequest(), timeout=10).load


def wait_until(stack: Stack, what: str, predicate: "object", timeout_s: float = 60.0) -> admin_service_pb2.Load:
    deadline = time.monotonic() + timeout_s
    while True:
        current = load(stack)
        if predicate(current):  # type: ignore[operator]
            return current
        assert time.monotonic() < deadline, f"never {what}: {current}"
        time.sleep(0.005)


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_cancel_by_killing_the_client(model_folder: Path, phase: str) -> None:
    """Blocks are free within one step, and a bystander's tokens are those of an undisturbed run."""
    seats = "1" if phase == "queued" else "8"
    config = StackConfig(
        model_folder,
        executor_flags=("--max-num-seqs", seats),
        scheduler_flags=("--max-chunk-tokens", "16", "--no-prefix-caching"),
        with_store=False,
    )
    bystander = greedy_request([11, 222, 3333, 4444], 200)
    with running_stack(config) as stack, stack.channel() as channel, ThreadPoolExecutor(1) as pool:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        undisturbed = collect(stub, bystander).token_ids
        answer = pool.submit(collect, stub, bystander)
        wait_until(stack, "the bystander runs", lambda now: now.num_running_requests == 1)

        client = subprocess.Popen([sys.executable, "-c", _CLIENT, stack.target, "900", phase], stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        assert client.stdout.readline() == "sent\n"
        if phase == "queued":
            wait_until(stack, "the victim waits", lambda now: now.num_waiting_requests == 1)
        elif phase == "prefill":
            wait_until(stack, "the victim is in its prompt", lambda now: now.executors[0].num_used_blocks > 20)
        else:
            assert client.stdout.readline() == "token\n"
        client.kill()
        client.wait()
        client.stdout.close()

        cancelled = wait_until(stack, "cancelled", lambda now: now.num_cancelled_requests == 1)
        # A step may be running while the cancellation comes in: one more at most, then everything is back.
        freed = wait_until(
            stack,
            "blocks free within one step",
            lambda now: (
                now.executors[0].num_used_blocks <= 16 or now.executors[0].num_steps > cancelled.executors[0].num_steps + 1
            ),
        )
        assert freed.executors[0].num_used_blocks <= 16, "the victim's 57 blocks must be free"
        assert answer.result().token_ids == undisturbed
        idle = wait_until(stack, "idle", lambda now: now.executors[0].num_running_sequences == 0)
        assert idle.executors[0].num_used_blocks == 0
