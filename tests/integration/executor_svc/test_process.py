"""The executor as real processes: how it starts, how it refuses, and what happens when a part of it is killed."""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from common.errors import Draining, ExecutorLost
from common.rpc.status import from_rpc_error
from common.token_ids import pack_token_ids
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.executor.v1 import executor_service_pb2_grpc
from tests.integration.executor_svc.processes import ServiceProcess, executor_flags, running
from tests.unit.executor_svc.tiny_engine import make_model_folder

GREEDY = pb.SequenceSampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0)


class Scheduler:
    """A scheduler's side of one session, on threads."""

    def __init__(self, target: str):
        self._requests: queue.Queue[pb.RunSessionRequest | None] = queue.Queue()
        self._channel = grpc.insecure_channel(target)
        stub = executor_service_pb2_grpc.ExecutorServiceStub(self._channel)
        self.events = stub.RunSession(iter(self._requests.get, None))
        self.send(pb.RunSessionRequest(hello=pb.Hello(scheduler_id="test", epoch=1)))
        self.info = next(self.events).ready

    def send(self, request: pb.RunSessionRequest | None) -> None:
        self._requests.put(request)

    def plan(self, plan: pb.StepPlan) -> None:
        self.send(pb.RunSessionRequest(plan=plan))

    def step(self, plan: pb.StepPlan) -> pb.StepResult:
        self.plan(plan)
        return next(self.events).result

    def end_error(self) -> Exception | None:
        """How the stream ends, once all events are read."""
        try:
            for _ in self.events:
                pass
        except grpc.RpcError as error:
            return from_rpc_error(error)
        return None

    def close(self) -> None:
        self.send(None)
        self._channel.close()


def prompt_plan(num_tokens: int = 6, step_id: int = 1) -> pb.StepPlan:
    """Sequence 1, its whole prompt, blocks 0 and up."""
    blocks = range(-(-(num_tokens + 8) // 4))
    new = pb.NewSequence(
        seq_id=1,
        token_ids=pack_token_ids(range(3, 3 + num_tokens)),
        num_prompt_tokens=num_tokens,
        block_ids=blocks,
        sampling=GREEDY,
    )
    return pb.StepPlan(step_id=step_id, new_sequences=[new], chunks=[pb.Chunk(seq_id=1, num_tokens=num_tokens)])


def decode_plan(step_id: int) -> pb.StepPlan:
    return pb.StepPlan(step_id=step_id, chunks=[pb.Chunk(seq_id=1, num_tokens=1)])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def executor(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One that the tests leave alive."""
    with running("executor_svc", tmp_path_factory.mktemp("run"), executor_flags(model_folder)) as process:
        process.wait_serving()
        yield process


def run_to_end(*flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "executor_svc", *flags], capture_output=True, text=True, timeout=60, check=False)


def test_run_ahead_plans_give_the_tokens_of_plans_one_by_one(executor: ServiceProcess) -> None:
    """Two plans are always on their way; the second decodes a token that nobody has seen."""
    scheduler = Scheduler(executor.target)
    expected = [scheduler.step(prompt_plan()).sampled[0].token_id]
    expected += [scheduler.step(decode_plan(step)).sampled[0].token_id for step in range(2, 8)]
    scheduler.close()

    ahead = Scheduler(executor.target)
    ahead.plan(prompt_plan())
    tokens = []
    for step in range(2, 8):
        ahead.plan(decode_plan(step))
        tokens.append(next(ahead.events).result.sampled[0].token_id)
    tokens.append(next(ahead.events).result.sampled[0].token_id)
    ahead.close()

    assert tokens == expected


def test_a_scheduler_that_vanishes_leaves_nothing_behind(executor: ServiceProcess) -> None:
    """The next session starts at step 1, with the same sequence id and the same blocks."""
    code = (
        "import sys; from pathlib import Path; from tests.integration.executor_svc.test_process import *\n"
        f"s = Scheduler({executor.target!r}); print(s.step(prompt_plan()).sampled[0].token_id, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        first = int(victim.stdout.readline())
        victim.kill()

    scheduler = Scheduler(executor.target)
    assert [sampled.token_id for sampled in scheduler.step(prompt_plan()).sampled] == [first]
    scheduler.close()


def test_a_malformed_plan_harms_only_its_sequence(executor: ServiceProcess) -> None:
    scheduler = Scheduler(executor.target)
    plan = prompt_plan()
    plan.chunks.add(seq_id=77, num_tokens=1)
    result = scheduler.step(plan)
    scheduler.close()

    assert [error.seq_id for error in result.errors] == [77]
    assert len(result.sampled) == 1


def test_info_tells_what_is_served(executor: ServiceProcess) -> None:
    scheduler = Scheduler(executor.target)
    info = scheduler.info
    scheduler.close()

    assert (info.num_blocks, info.block_size, info.vocab_size, info.dtype) == (64, 4, 128, "float32")
    assert len(info.kv_fingerprint) == 32
    assert info.memory_bytes["kv_pool"] == info.num_blocks * info.block_bytes
    assert info.memory_bytes["weights"] > 0
    assert info.startup_phases[0].name == "prepare"
    assert info.kv_transport_reason == "no block store is configured"


def test_a_second_executor_on_the_address_is_refused(executor: ServiceProcess, model_folder: Path) -> None:
    second = run_to_end("--listen", executor.target, *executor_flags(model_folder))

    assert second.returncode == 1
    assert "cannot start: cannot listen on" in second.stderr
    assert "Traceback" not in second.stderr
    assert executor.health() == health_pb2.HealthCheckResponse.SERVING


def test_a_second_executor_on_the_port_is_refused(model_folder: Path, tmp_path: Path) -> None:
    with running("executor_svc", tmp_path, ["--listen", "127.0.0.1:50961", *executor_flags(model_folder)]) as first:
        first.target = "127.0.0.1:50961"
        first.health()
        second = run_to_end("--listen", "127.0.0.1:50961", *executor_flags(model_folder))

    assert second.returncode == 1
    assert "cannot listen on 127.0.0.1:50961: the address is in use" in second.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["--model", "{empty}"], "has no config.json"),
        (["--model", "{config}"], "has no weights"),
        (["--model", "{config}", "--load-format", "random", "--max-model-len", "999"], "max_model_len: 999"),
        (["--block-size", "0"], "--block-size"),
        (["--listen", "0.0.0.0:50962"], "refusing to listen on 0.0.0.0:50962"),
    ],
)
def test_a_start_that_cannot_work_says_so_in_one_line(
    flags: list[str], sentence: str, model_folder: Path, tmp_path: Path
) -> None:
    places = {"{empty}": str(tmp_path), "{config}": str(model_folder)}
    listen = [] if "--listen" in flags else ["--listen", f"unix:{tmp_path}/e.sock"]

    process = run_to_end(*listen, *[places.get(flag, flag) for flag in flags])

    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    (line,) = [line for line in process.stderr.splitlines() if "cannot start" in line]
    assert sentence in line


def test_a_killed_worker_ends_session_and_process(model_folder: Path, tmp_path: Path) -> None:
    with running("executor_svc", tmp_path, executor_flags(model_folder)) as process:
        process.wait_serving()
        scheduler = Scheduler(process.target)
        scheduler.step(prompt_plan())
        (worker,) = process.children()
        os.kill(worker, signal.SIGKILL)

        assert isinstance(scheduler.end_error(), ExecutorLost)
        assert process.popen.wait(15) == 1
        assert f"the worker process {worker} is gone: signal SIGKILL" in process.log_text()


def test_a_killed_front_takes_its_worker_along(model_folder: Path, tmp_path: Path) -> None:
    with running("executor_svc", tmp_path, executor_flags(model_folder)) as process:
        process.wait_serving()
        (worker,) = process.children()
        process.popen.kill()
        process.popen.wait()
        deadline = time.monotonic() + 15
        while Path(f"/proc/{worker}").exists():
            assert time.monotonic() < deadline, "the worker outlives its front"
            time.sleep(0.01)


def test_sigterm_during_steps_ends_with_status_0_within_grace(model_folder: Path, tmp_path: Path) -> None:
    with running("executor_svc", tmp_path, executor_flags(model_folder, "--grace-s", "5")) as process:
        process.wait_serving()
        scheduler = Scheduler(process.target)
        scheduler.plan(prompt_plan())
        for step in range(2, 8):
            scheduler.plan(decode_plan(step))
        next(scheduler.events)
        started = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)

        assert isinstance(scheduler.end_error(), Draining)
        assert process.popen.wait(15) == 0
        assert time.monotonic() - started < 6


def test_sigterm_while_loading_ends_with_status_0(model_folder: Path, tmp_path: Path) -> None:
    with running("executor_svc", tmp_path, executor_flags(model_folder)) as process:
        assert process.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        process.popen.send_signal(signal.SIGTERM)

        assert process.popen.wait(15) == 0
