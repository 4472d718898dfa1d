"""A scheduler without an engine: the public API with made-up answers, for tests of the client and the command line.

Every prompt of n words is n tokens; the answer is the prompt's words in reverse, one token a word. A prompt that names an
error of common/errors.py fails with it; one that ends in "forever" is answered without end.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from common import errors
from common.rpc.address import Address
from common.rpc.security import ServerSecurity
from common.rpc.server import RpcServer
from octavo.scheduler.v1 import admin_service_pb2 as admin
from octavo.scheduler.v1 import admin_service_pb2_grpc, inference_service_pb2_grpc, model_service_pb2_grpc
from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1 import model_service_pb2 as models_pb

MODEL = "models/fake"
SERVICES = ("octavo.scheduler.v1.InferenceService", "octavo.scheduler.v1.ModelService", "octavo.scheduler.v1.AdminService")


class FakeScheduler(
    inference_service_pb2_grpc.InferenceServiceServicer,
    model_service_pb2_grpc.ModelServiceServicer,
    admin_service_pb2_grpc.AdminServiceServicer,
):
    """See the module's first lines.

    Attributes:
        requests: every GenerateRequest that came.
        left: set when a client left a stream before its end.
    """

    def __init__(self, num_executors: int = 1) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.left = threading.Event()
        self._num_executors = num_executors
        self._num_looks = 0
        self._added: list[str] = []

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: N802
        self.requests.append(request)
        words = _words(request)
        outputs = [
            pb.Delta(
                index=index,
                text=" ".join(reversed(words)),
                token_ids=range(len(words)),
                finish_reason=pb.FINISH_REASON_LENGTH,
            )
            for index in range(max(1, request.n))
        ]
        return pb.GenerateResponse(request_id="r-1", outputs=outputs, usage=_usage(words), timing=_timing())

    async def StreamGenerate(  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: Any
    ) -> AsyncGenerator[pb.StreamGenerateResponse, None]:
        generation = request.generation
        self.requests.append(generation)
        words = _words(generation)
        num_samples = max(1, generation.n)
        try:
            for number, word in enumerate(reversed(words)):
                text = word if number == 0 else f" {word}"
                deltas = [pb.Delta(index=index, text=text, token_ids=[number]) for index in range(num_samples)]
                yield pb.StreamGenerateResponse(request_id="r-1", deltas=deltas)
            while words[-1:] == ["forever"]:
                yield pb.StreamGenerateResponse(request_id="r-1", deltas=[pb.Delta(text=" and on")])
                await asyncio.sleep(0.01)  # a stream that does not flood
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise
        ends = [pb.Delta(index=index, finish_reason=pb.FINISH_REASON_STOP) for index in range(num_samples)]
        ends[0].stop_str = "\n"
        yield pb.StreamGenerateResponse(request_id="r-1", deltas=ends, usage=_usage(words), timing=_timing())

    async def GenerateSession(self, request_iterator: Any, context: Any) -> AsyncGenerator[pb.GenerateSessionResponse, None]:  # noqa: N802
        raise errors.OctavoError("not faked")
        yield

    async def CancelGeneration(self, request: pb.CancelGenerationRequest, context: Any) -> pb.CancelGenerationResponse:  # noqa: N802
        return pb.CancelGenerationResponse(cancelled=request.request_id == "running")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        text = request.text or " ".join(f"<{turn.role}> {turn.content}" for turn in request.chat.messages)
        return pb.TokenizeResponse(token_ids=[len(word) for word in text.split()], text=text)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        return pb.DetokenizeResponse(text=" ".join(f"t{token_id}" for token_id in request.token_ids))

    async def ListModels(self, request: models_pb.ListModelsRequest, context: Any) -> models_pb.ListModelsResponse:  # noqa: N802
        if request.page_token == "":
            model = models_pb.Model(
                name=MODEL,
                max_context_tokens=8192,
                vocab_size=100,
                dtype="float32",
                ready=True,
                num_executors=1,
                has_tokenizer=True,
                has_chat_template=True,
                eos_token_ids=[0, 2],
            )
            return models_pb.ListModelsResponse(models=[model], next_page_token="2")
        return models_pb.ListModelsResponse(models=[models_pb.Model(name="models/second")])

    async def GetServerInfo(self, request: admin.GetServerInfoRequest, context: Any) -> admin.GetServerInfoResponse:  # noqa: N802
        executors = [
            admin.ExecutorStatus(executor_id=f"executor-{index}", connected=True, block_size=16, memory_bytes={"weights": 5})
            for index in range(self._num_executors)
        ]
        executors += [
            admin.ExecutorStatus(executor_id="new", address=address, connected=True, num_requests=3, leaving=True)
            for address in self._added
        ]
        store = admin.KvStoreStatus(address="unix:/s", connected=False, reason="refused", tiers=[admin.TierLoad(tier="shm")])
        return admin.GetServerInfoResponse(version="9", uptime_s=1.5, settings={"a": "b"}, executors=executors, kvstore=store)

    async def GetLoad(self, request: admin.GetLoadRequest, context: Any) -> admin.GetLoadResponse:  # noqa: N802
        return admin.GetLoadResponse(load=self._load())

    async def WatchLoad(self, request: admin.WatchLoadRequest, context: Any) -> AsyncGenerator[admin.WatchLoadResponse, None]:  # noqa: N802
        while True:
            yield admin.WatchLoadResponse(load=self._load())

    async def FlushCache(self, request: admin.FlushCacheRequest, context: Any) -> admin.FlushCacheResponse:  # noqa: N802
        return admin.FlushCacheResponse(num_device_blocks=3, num_store_blocks=4 if request.include_store else 0)

    async def AddExecutor(self, request: admin.AddExecutorRequest, context: Any) -> admin.AddExecutorResponse:  # noqa: N802
        self._added.append(request.address)
        return admin.AddExecutorResponse(executor=admin.ExecutorStatus(address=request.address, problem="not tried yet"))

    async def RemoveExecutor(self, request: admin.RemoveExecutorRequest, context: Any) -> admin.RemoveExecutorResponse:  # noqa: N802
        if request.address not in self._added:
            raise errors.InvalidParameter("address", f"{request.address} is no executor of this scheduler")
        if request.drain.seconds < 3600:
            self._added.remove(request.address)
        return admin.RemoveExecutorResponse(executor=admin.ExecutorStatus(address=request.address, leaving=True))

    def _load(self) -> admin.Load:
        """Each look is two seconds and eighty output tokens after the one before."""
        self._num_looks += 1
        executor = admin.ExecutorLoad(
            executor_id="executor-0",
            connected=True,
            num_running_sequences=5,
            num_blocks=100,
            num_used_blocks=40,
            num_shared_blocks=10,
            num_cached_blocks=25,
            num_free_blocks=35,
            step_s=0.0125,
            idle_ratio=0.25,
            kv_dtype="fp8_e4m3",
        )
        tier = admin.TierLoad(tier="shm", capacity_bytes=1 << 30, used_bytes=1 << 20, num_blocks=7, num_hits=3)
        tier.largest_free_run_bytes = (tier.capacity_bytes - tier.used_bytes) // 2
        disk = admin.TierLoad(tier="disk", capacity_bytes=1 << 40, used_bytes=1 << 30, num_blocks=700)
        disk.num_hits, disk.num_misses, disk.num_verify_failures, disk.num_timeouts = 3 * self._num_looks, self._num_looks, 2, 5
        disk.read_bytes, disk.read_s, disk.read_latency_s = self._num_looks << 30, 0.5 * self._num_looks, 0.004
        disk.load_bytes_per_s = 3 << 29
        disk.unavailable_reason = "/kv: no space left"
        return admin.Load(
            uptime_s=2.0 * self._num_looks,
            num_running_requests=4,
            num_waiting_requests=2,
            num_prompt_tokens=200,
            num_cached_tokens=50,
            num_output_tokens=80 * self._num_looks,
            executors=[executor] * self._num_executors,
            tiers=[tier, disk],
            degraded={"kvstore_unavailable": 6},
            cached_tokens_by_tier={"device": 50},
        )


def _words(request: pb.GenerateRequest) -> list[str]:
    match request.WhichOneof("prompt"):
        case "text":
            words = request.text.split()
        case "chat":
            words = [word for turn in request.chat.messages for word in turn.content.split()]
        case _:
            words = [str(token_id) for token_id in request.token_ids.ids]
    for word in words:
        error_class = getattr(errors, word, None)
        if isinstance(error_class, type) and issubclass(error_class, errors.InvalidParameter):
            raise error_class("prompt", "is bad")
        if isinstance(error_class, type) and issubclass(error_class, errors.OctavoError):
            raise error_class("as asked for")
    return words


def _usage(words: list[str]) -> pb.Usage:
    num = len(words)
    return pb.Usage(prompt_tokens=num, completion_tokens=num, cached_tokens=1, cached_tokens_by_tier={"device": 1})


def _timing() -> pb.Timing:
    return pb.Timing(queue_s=0.25, time_to_first_token_s=0.5, total_s=1.5)


async def start(fake: FakeScheduler, listen: str, security: ServerSecurity | None = None) -> RpcServer:
    """A started server of the fake."""
    server = RpcServer(Address.parse(listen), security or ServerSecurity(), SERVICES, admin_services=(SERVICES[2],))
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server.grpc)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(fake, server.grpc)
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(fake, server.grpc)
    await server.start()
    return server


@contextmanager
def in_thread(fake: FakeScheduler, listen: str, security: ServerSecurity | None = None) -> Iterator[str]:
    """The fake on a thread of its own, for synchronous callers; gives its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(start(fake, listen, security), loop).result(10)
        try:
            yield server.address.target
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
