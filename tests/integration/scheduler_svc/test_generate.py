"""What comes back for good requests: tokens, text, stops, samples, usage."""

from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1 import model_service_pb2 as models_pb
from scheduler_svc.text.tokenizer import Tokenizer
from tests.integration.scheduler_svc.conftest import Serve, Served, stream_tokens, tokens_request
from tests.integration.scheduler_svc.fake_executor import continuation
from tests.unit.scheduler_svc.text.small_tokenizers import byte_level

PROMPT = [5, 6, 7, 8, 9, 10, 11]
TOKENIZER = Tokenizer(byte_level())


def plain_text(num_tokens: int, prompt: list[int] = PROMPT) -> str:
    return TOKENIZER.decode(continuation(prompt, num_tokens), skip_special_tokens=True)


async def streamed(served: Served, request: pb.GenerateRequest) -> list[pb.StreamGenerateResponse]:
    return [message async for message in served.inference.StreamGenerate(pb.StreamGenerateRequest(generation=request))]


def text_of(messages: list[pb.StreamGenerateResponse], index: int = 0) -> str:
    return "".join(delta.text for message in messages for delta in message.deltas if delta.index == index)


async def test_a_unary_answer_has_tokens_text_usage_and_timing(serve: Serve) -> None:
    async with serve() as served:
        answer = await served.inference.Generate(tokens_request(PROMPT, 20))
        assert list(answer.outputs[0].token_ids) == continuation(PROMPT, 20)
        assert answer.outputs[0].text == plain_text(20)
        assert answer.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 20)
        assert answer.timing.total_s >= answer.timing.time_to_first_token_s > 0
        served.check_integrity()


async def test_a_stream_gives_the_same_and_a_second_run_finds_the_prefix(serve: Serve) -> None:
    async with serve() as served:
        assert await stream_tokens(served, tokens_request(PROMPT, 20)) == continuation(PROMPT, 20)
        messages = await streamed(served, tokens_request(PROMPT, 20))
        assert text_of(messages) == plain_text(20)
        assert dict(messages[-1].usage.cached_tokens_by_tier) == {"device": 4}
        assert [message.HasField("timing") for message in messages] == [False] * (len(messages) - 1) + [True]


async def test_a_cache_salt_keeps_prefixes_apart(serve: Serve) -> None:
    async with serve() as served:
        await served.inference.Generate(tokens_request(PROMPT, 2, cache_salt="a"))
        other = await served.inference.Generate(tokens_request(PROMPT, 2, cache_salt="b"))
        same = await served.inference.Generate(tokens_request(PROMPT, 2, cache_salt="a"))
        assert (other.usage.cached_tokens, same.usage.cached_tokens) == (0, 4)


async def test_a_stop_string_across_token_borders_ends_each_sample_and_frees_its_blocks(serve: Serve) -> None:
    async with serve() as served:
        whole = plain_text(60)
        stop = whole[20:23]  # every token of the fake model is one character
        request = tokens_request(PROMPT, 60, n=3)
        request.stopping.stop.append(stop)
        messages = await streamed(served, request)
        end = whole.index(stop)
        for index in range(3):
            assert text_of(messages, index) == whole[:end]
        last = {delta.index: delta for message in messages for delta in message.deltas if delta.finish_reason}
        assert all(delta.finish_reason == pb.FINISH_REASON_STOP and delta.stop_str == stop for delta in last.values())
        assert messages[-1].usage.completion_tokens == 3 * (end + 3)
        load = await served.load()
        assert (load.executors[0].num_used_blocks, load.num_running_requests, load.num_finished_requests) == (0, 0, 1)
        served.check_integrity()

        request.stopping.include_stop_str_in_output = True
        assert text_of(await streamed(served, request), 2) == whole[: end + 3]


async def test_a_stop_token_is_no_text(serve: Serve) -> None:
    async with serve() as served:
        output = continuation(PROMPT, 30)
        request = tokens_request(PROMPT, 30)
        request.stopping.stop_token_ids.append(output[9])
        first = output.index(output[9])
        answer = await served.inference.Generate(request)
        delta = answer.outputs[0]
        assert (delta.finish_reason, delta.stop_token_id) == (pb.FINISH_REASON_STOP, output[9])
        assert list(delta.token_ids) == output[: first + 1]
        assert delta.text == TOKENIZER.decode(output[:first], skip_special_tokens=True)


async def test_text_chat_and_echo(serve: Serve) -> None:
    async with serve() as served:
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
        tokens = await served.inference.Tokenize(pb.TokenizeRequest(chat=chat))
        assert tokens.text == "<s>user\nhello</s>\n<s>assistant\n"
        prompt = list(tokens.token_ids)
        assert prompt == TOKENIZER.encode(tokens.text, add_special_tokens=False)
        request = pb.GenerateRequest(chat=chat, stopping=pb.StoppingCriteria(max_tokens=10), output=pb.OutputOptions(echo=True))
        answer = await served.inference.Generate(request)
        assert answer.outputs[0].text == tokens.text + plain_text(10, prompt)
        assert not answer.outputs[0].token_ids
        detokenized = await served.inference.Detokenize(pb.DetokenizeRequest(token_ids=prompt))
        assert detokenized.text == tokens.text


async def test_logprobs_travel_with_their_tokens(serve: Serve) -> None:
    async with serve() as served:
        request = tokens_request(PROMPT, 6)
        request.output.logprobs = 0
        delta = (await served.inference.Generate(request)).outputs[0]
        assert [logprobs.chosen.token_id for logprobs in delta.logprobs] == list(delta.token_ids)


async def test_without_max_tokens_the_context_is_the_end(serve: Serve) -> None:
    async with serve() as served:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
        answer = await served.inference.Generate(request)
        assert answer.usage.prompt_tokens + answer.usage.completion_tokens == served.fake.info.max_model_len


async def test_a_pool_smaller_than_the_context_is_the_end_too(serve: Serve) -> None:
    async with serve(info={"num_blocks": 10}) as served:
        answer = await served.inference.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT)))
        assert answer.usage.prompt_tokens + answer.usage.completion_tokens == 40


async def test_one_sequence_that_fails_fails_alone(serve: Serve) -> None:
    async with serve() as served:
        expected = continuation(PROMPT, 20)
        served.fake.fail_token = next(token_id for token_id in continuation([1, 2, 3], 40) if token_id not in expected)
        bad, good = tokens_request([1, 2, 3], 50), tokens_request(PROMPT, 20)
        failed = (await served.inference.Generate(bad)).outputs[0]
        assert (failed.finish_reason, failed.error_message) == (pb.FINISH_REASON_ERROR, "poisoned")
        assert await stream_tokens(served, good) == expected


async def test_the_model_is_listed(serve: Serve) -> None:
    async with serve() as served:
        await served.app.engine.served_model()
        model = (await served.models.ListModels(models_pb.ListModelsRequest())).models[0]
        assert (model.name, model.ready, model.num_executors, model.vocab_size) == ("models/fake", True, 1, 300)
        assert (model.has_tokenizer, model.has_chat_template, list(model.eos_token_ids)) == (True, True, [257])
