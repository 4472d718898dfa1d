from pathlib import Path

import pytest

from common.block_hash import root_key
from common.clock import ManualClock
from octavo.executor.v1 import executor_service_pb2 as executor_pb
from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.types.v1.types_pb2 import SamplingParams as WireSampling
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.edge.preparation import Preparation
from scheduler_svc.text.model_text import ModelText
from tests.unit.scheduler_svc.text.small_tokenizers import BYTE_VOCAB_SIZE, EOS_ID, write_model_folder

INFO = executor_pb.ExecutorInfo(
    model="models/small", kv_fingerprint=b"f" * 32, num_blocks=100, block_size=4, max_model_len=128, vocab_size=BYTE_VOCAB_SIZE
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path)


async def prepare(folder: Path, message: pb.GenerateRequest, *, salt: str = "") -> Request:
    preparation = Preparation(ModelText.load(folder), ManualClock(100.0), salt)
    request, _ = await preparation.prepare(message, INFO, is_streamed=True)
    return request


async def test_what_is_not_set_has_the_models_defaults(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 257], "temperature": 0.5, "top_k": 7}')
    request = await prepare(folder, pb.GenerateRequest(text="hello"))
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.5, 7, 1.0)
    assert request.sampling.num_logprobs is None
    assert request.stop.stop_token_ids == {2, 257}
    assert request.stop.max_tokens == 128 - len(request.prompt_token_ids)
    assert (request.n, request.arrival_s, request.queue_deadline_s) == (1, 100.0, None)
    assert request.request_id


async def test_what_is_set_counts_and_zero_is_a_value(folder: Path) -> None:
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2]),
        sampling=WireSampling(temperature=0, seed=0, logit_bias={5: 1.5}),
        stopping=pb.StoppingCriteria(max_tokens=4, min_tokens=1, stop_token_ids=[9], ignore_eos=True),
        output=pb.OutputOptions(logprobs=0),
        n=3,
        request_id="mine",
    )
    message.queue_timeout.FromMilliseconds(1500)
    request = await prepare(folder, message)
    assert request.sampling == SamplingParams(temperature=0.0, seed=0, logit_bias={5: 1.5}, num_logprobs=0)
    assert request.stop == StopConditions(4, 1, frozenset({9}))
    assert (request.request_id, request.n, request.queue_deadline_s) == ("mine", 3, 101.5)


async def test_every_request_without_a_seed_has_one_of_its_own(folder: Path) -> None:
    seeds = {(await prepare(folder, pb.GenerateRequest(text="hello"))).sampling.seed for _ in range(8)}
    assert len(seeds) == 8


async def test_salts_of_server_and_request_decide_the_root(folder: Path) -> None:
    async def root(server: str, client: str) -> bytes:
        return (await prepare(folder, pb.GenerateRequest(text="hello", cache_salt=client), salt=server)).root_key

    assert await root("", "") == root_key(INFO.kv_fingerprint)
    roots = [await root(*pair) for pair in (("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"))]
    assert len(set(roots)) == len(roots)
    assert await root("a", "b") == await root("a", "b")


async def test_a_chat_goes_through_the_template_without_special_tokens_added_twice(folder: Path) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")], add_generation_prompt=False)
    request = await prepare(folder, pb.GenerateRequest(chat=chat))
    assert request.prompt_token_ids[0] == EOS_ID - 1 and list(request.prompt_token_ids).count(EOS_ID - 1) == 1


async def test_a_long_text_is_tokenised_like_a_short_one(folder: Path) -> None:
    text = ModelText.load(folder)
    assert text.tokenizer is not None
    long = "hello world " * 1000
    assert await text.encode(long, add_special_tokens=True) == text.tokenizer.encode(long)
    text.close()
