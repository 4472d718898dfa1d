from octavo.scheduler.v1 import inference_service_pb2 as pb
from tests.integration.scheduler_svc.conftest import Serve, stream_tokens, tokens_request
from tests.integration.scheduler_svc.fake_executor import continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11]


async def test_a_unary_answer_has_the_tokens_usage_and_timing(serve: Serve) -> None:
    async with serve() as served:
        answer = await served.inference.Generate(tokens_request(PROMPT, 20))
        assert list(answer.outputs[0].token_ids) == continuation(PROMPT, 20)
        assert answer.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 20)
        assert answer.timing.total_s >= answer.timing.time_to_first_token_s > 0
        served.check_integrity()


async def test_a_stream_gives_the_same_and_a_second_run_finds_the_prefix(serve: Serve) -> None:
    async with serve() as served:
        assert await stream_tokens(served, tokens_request(PROMPT, 20)) == continuation(PROMPT, 20)
        answer = await served.inference.Generate(tokens_request(PROMPT, 20))
        assert dict(answer.usage.cached_tokens_by_tier) == {"device": 4}
        assert list(answer.outputs[0].token_ids) == continuation(PROMPT, 20)
