"""A scheduler that serves a real model records what happens to it; run again, its core decides the same, call by call."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2, inference_service_pb2_grpc
from scheduler_svc.core_maker import plain_scheduler
from scheduler_svc.recording.reader import RecordingFile
from scheduler_svc.recording.replay import Replay, ReplayFigures
from tests.e2e.stack import Stack, StackConfig, collect, greedy_request, running_stack

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
NUM_REQUESTS = 12
NUM_BLOCKS = 24
"""Of each executor: less than what runs there wants at its end."""


def replay_all(folder: Path) -> list[ReplayFigures]:
    figures = []
    for path in sorted(folder.glob("*.0000.octrec")):
        replay = Replay(plain_scheduler)
        for call in RecordingFile.of(path).calls():
            replay.take(call)
        figures.append(replay.end())
    return figures


def send(stack: Stack, index: int, rng: random.Random) -> str:
    """One request; a third of them is cancelled. Returns how it ended."""
    prompt = [rng.randrange(10, 30_000) for _ in range(rng.choice([20, 60, 100]))]
    request = greedy_request(prompt, rng.choice([30, 60]), n=1 + index % 2, request_id=f"request-{index}")
    with stack.channel() as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        if index % 3:
            collect(stub, request)
            return "whole"
        call = stub.StreamGenerate(request)
        next(call)  # it runs
        if index % 2:
            call.cancel()
        else:
            stub.CancelGeneration(inference_service_pb2.CancelGenerationRequest(request_id=f"request-{index}"))
        with pytest.raises(grpc.RpcError):
            list(call)
        return "cancelled"


def test_no_decision_differs_after_preemptions_cancels_and_a_killed_executor(model_folder: Path, tmp_path: Path) -> None:
    recordings = tmp_path / "recordings"
    config = StackConfig(
        model_folder,
        executor_flags=("--num-blocks", str(NUM_BLOCKS)),
        scheduler_flags=("--record", str(recordings)),
        store_flags=("--capacity-bytes", str(256 << 20)),
        num_executors=2,
        num_threads=1,
    )
    with running_stack(config) as stack, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        ends = [pool.submit(send, stack, index, random.Random(index)) for index in range(NUM_REQUESTS)]
        with stack.channel() as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)
            deadline = time.monotonic() + 60
            while min(e.num_steps for e in admin.GetLoad(admin_service_pb2.GetLoadRequest()).load.executors) < 12:
                assert time.monotonic() < deadline, "the requests never ran"
                time.sleep(0.01)
        victim = stack.processes["executor-0"].popen
        victim.kill()
        victim.wait()
        stack.start_executor(0)
        assert [end.result() for end in ends].count("cancelled") == NUM_REQUESTS // 3
        stack.wait_executors()
        assert send(stack, 1, random.Random(99)) == "whole"

    figures = replay_all(recordings)
    assert [one.differences for one in figures] == [[], []]
    assert all(one.over == "" for one in figures), "the scheduler did not end in good order"
    assert sum(one.num_preemptions for one in figures) > 0
    assert sum(one.num_cancelled for one in figures) >= NUM_REQUESTS // 3
    assert sum(one.num_losses for one in figures) >= 1
    assert sum(one.num_steps for one in figures) > 60
