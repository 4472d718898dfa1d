"""Both clients against a fake scheduler over a real wire."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from common.rpc.security import ServerSecurity
from octavo.answers import Finish, Finished, FinishReason, TextDelta, Tokens
from octavo.client import AsyncOctavoClient, ClientSecurity, OctavoClient
from octavo.errors import (
    DeadlineExceeded,
    InvalidParameter,
    ModelNotFound,
    NoExecutor,
    PermissionDenied,
    QueueFull,
    StartupError,
    Unauthenticated,
    Unavailable,
)
from octavo.prompt import ChatMessage
from octavo.scheduler.v1 import inference_service_pb2 as pb
from tests.unit.common.rpc.certificate import write_certificate
from tests.unit.octavo.conftest import Served
from tests.unit.octavo.fake_scheduler import FakeScheduler, in_thread


def test_generate_gives_the_whole_answer(served: Served) -> None:
    with OctavoClient(served.target) as client:
        answer = client.generate("one two three", max_tokens=3, n=2)

    assert answer.text == "three two one"
    assert [sample.token_ids for sample in answer.samples] == [(0, 1, 2)] * 2
    assert answer.samples[0].finish == Finish(FinishReason.LENGTH)
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens_by_tier) == (3, {"device": 1})
    assert answer.timing.tokens_per_s(answer.usage.completion_tokens) == 2.0
    assert answer.request_id == "r-1"


def test_stream_gives_deltas_and_then_how_it_ended(served: Served) -> None:
    with OctavoClient(served.target) as client:
        *deltas, end = client.stream("one two")

    assert deltas == [TextDelta(0, "two", (0,)), TextDelta(0, " one", (1,))]
    assert isinstance(end, Finished)
    assert end.finishes == (Finish(FinishReason.STOP, stop_str="\n"),)
    assert end.usage.completion_tokens == 2
    assert end.timing.total_s == 1.5


def test_samples_of_a_stream_are_told_apart(served: Served) -> None:
    with OctavoClient(served.target) as client:
        *deltas, end = client.stream("a", n=2)

    assert [delta.index for delta in deltas if isinstance(delta, TextDelta)] == [0, 1]
    assert isinstance(end, Finished)
    assert [finish.stop_str for finish in end.finishes] == ["\n", None]


def test_every_other_call(served: Served) -> None:
    with OctavoClient(served.target) as client:
        assert client.tokenize("ab c") == Tokens((2, 1), "ab c")
        assert client.tokenize([ChatMessage("user", "hi")]).text == "<user> hi"
        assert client.detokenize([4, 5]) == "t4 t5"
        assert client.cancel("running")
        assert not client.cancel("gone")
        assert [model.name for model in client.models()] == ["models/fake", "models/second"]
        assert client.models()[0].eos_token_ids == (0, 2)
        assert client.flush_cache(include_store=True).num_store_blocks == 4
        assert client.add_executor("h:1").problem == "not tried yet"
        assert client.remove_executor("h:1", drain_s=5).leaving
        info = client.server_info()
        load = client.load()
        looks = list(itertools.islice(client.watch_load(0.1), 2))

    assert info.kvstore is not None
    assert (info.kvstore.reason, info.kvstore.tiers[0].tier) == ("refused", "shm")
    assert info.executors[0].memory_bytes == {"weights": 5}
    assert (load.executors[0].num_shared_blocks, load.degraded) == (10, {"kvstore_unavailable": 6})
    assert looks[1].num_output_tokens - looks[0].num_output_tokens == 80


async def test_the_asynchronous_client_does_the_same(served: Served) -> None:
    async with AsyncOctavoClient(served.target) as client:
        assert (await client.generate("one two")).text == "two one"
        events = [event async for event in client.stream("one two")]
        assert (await client.tokenize("ab c")).token_ids == (2, 1)
        assert await client.detokenize([4]) == "t4"
        assert await client.cancel("running")
        assert [model.name for model in await client.models()] == ["models/fake", "models/second"]
        assert (await client.server_info()).version == "9"
        assert (await client.load()).num_running_requests == 4
        assert (await client.flush_cache()).num_device_blocks == 3
        assert (await client.add_executor("h:2")).address == "h:2"
        assert (await client.remove_executor("h:2")).leaving
        async for load in client.watch_load(0.1):
            assert load.num_waiting_requests == 2
            break
    assert [type(event) for event in events] == [TextDelta, TextDelta, Finished]


def test_both_clients_have_the_same_methods() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(OctavoClient) == public(AsyncOctavoClient)


@pytest.mark.parametrize(("name", "error_class"), [("QueueFull", QueueFull), ("ModelNotFound", ModelNotFound)])
async def test_errors_of_the_server_come_back_as_themselves(name: str, error_class: type[Exception], served: Served) -> None:
    with OctavoClient(served.target) as client:
        with pytest.raises(error_class, match="as asked for"):
            client.generate(name)
        with pytest.raises(error_class):
            list(client.stream(name))
    async with AsyncOctavoClient(served.target) as async_client:
        with pytest.raises(error_class):
            await async_client.generate(name)
        with pytest.raises(error_class):
            async for _ in async_client.stream(name):
                pass


def test_a_bad_parameter_keeps_its_field(served: Served) -> None:
    with OctavoClient(served.target) as client, pytest.raises(InvalidParameter) as caught:
        client.generate("PromptTooLong")

    assert (caught.value.field, caught.value.problem) == ("prompt", "is bad")


async def test_no_server_is_unavailable_and_named(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/nobody.sock"
    with OctavoClient(target) as client, pytest.raises(Unavailable, match="no server answers at"):
        client.models()
    async with AsyncOctavoClient(target) as async_client:
        with pytest.raises(Unavailable, match="no server answers at"):
            await async_client.models()


class Waking(FakeScheduler):
    """Is unavailable a few times, before or after the first message of an answer."""

    def __init__(self, num_failures: int, *, after_first: bool = False):
        super().__init__()
        self.num_calls = 0
        self._num_failures = num_failures
        self._after_first = after_first

    async def StreamGenerate(  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: Any
    ) -> AsyncGenerator[pb.StreamGenerateResponse, None]:
        self.num_calls += 1
        fails = self.num_calls <= self._num_failures
        if fails and not self._after_first:
            raise NoExecutor("not yet")
        async for response in super().StreamGenerate(request, context):
            yield response
            if fails:
                raise NoExecutor("no more")


def test_a_server_that_is_unavailable_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    fake = Waking(2)
    with in_thread(fake, f"unix:{tmp_path}/s.sock") as target, OctavoClient(target) as client:
        assert len(list(client.stream("one two"))) == 3

    assert fake.num_calls == 3


@pytest.mark.parametrize(("num_failures", "after_first", "num_calls"), [(9, False, 3), (1, True, 1)])
def test_it_is_not_asked_for_ever_and_never_after_the_first_message(
    num_failures: int, after_first: bool, num_calls: int, tmp_path: Path
) -> None:
    fake = Waking(num_failures, after_first=after_first)
    with in_thread(fake, f"unix:{tmp_path}/s.sock") as target, OctavoClient(target) as client, pytest.raises(NoExecutor):
        list(client.stream("one two"))

    assert fake.num_calls == num_calls


def test_a_deadline_ends_a_call(served: Served) -> None:
    with OctavoClient(served.target, timeout_s=0.2) as client, pytest.raises(DeadlineExceeded):
        list(client.stream("forever"))
    assert served.fake.left.wait(10)


def test_leaving_a_stream_cancels_the_request(served: Served) -> None:
    with OctavoClient(served.target) as client:
        for _ in client.stream("forever"):
            break

        assert served.fake.left.wait(10)


async def test_leaving_an_asynchronous_stream_cancels_the_request(served: Served) -> None:
    async with AsyncOctavoClient(served.target) as client:
        stream = client.stream("forever")
        await anext(stream)
        await stream.aclose()

        assert await asyncio.to_thread(served.fake.left.wait, 10)


def test_threads_share_a_client(served: Served) -> None:
    answers: list[str] = []
    with OctavoClient(served.target) as client:
        threads = [threading.Thread(target=lambda: answers.append(client.generate("a b").text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert answers == ["b a"] * 8


def test_tokens_open_what_they_are_for(tmp_path: Path) -> None:
    security = ServerSecurity(token="user", admin_token="admin")
    with in_thread(FakeScheduler(), f"unix:{tmp_path}/s.sock", security) as target:
        with OctavoClient(target) as client, pytest.raises(Unauthenticated):
            client.models()
        with OctavoClient(target, token="user") as client:
            assert client.generate("a").text == "a"
            with pytest.raises(PermissionDenied):
                client.load()
        with OctavoClient(target, token="admin") as client:
            assert client.load().num_running_requests == 4


def test_tls_is_spoken_to_servers_that_are_trusted(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    security = ServerSecurity(tls_cert=cert, tls_key=key, token="user")
    with (
        in_thread(FakeScheduler(), "127.0.0.1:0", security) as target,
        OctavoClient(target, token="user", security=ClientSecurity(tls_ca=cert)) as client,
    ):
        assert client.generate("a").text == "a"


def test_a_token_is_not_sent_to_other_hosts_in_the_clear() -> None:
    with pytest.raises(InvalidParameter, match="plain connection"):
        OctavoClient("192.0.2.1:50051", token="user")
    OctavoClient("192.0.2.1:50051", token="user", security=ClientSecurity(insecure=True)).close()


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(StartupError, match="host:port"):
        OctavoClient("nonsense")
