"""Every call of the public API, once: its request, its method, and what its response becomes.

The synchronous and the asynchronous client differ only in how they send a Call. Knows messages; opens no channel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from octavo import answers, load
from octavo.answers import Completion, Event, Finish, Finished, FinishReason, Model, Sample, TextDelta, Timing, Tokens, Usage
from octavo.errors import InvalidParameter
from octavo.prompt import GenerateOptions, Prompt, generate_request, set_field, set_prompt
from octavo.scheduler.v1 import admin_service_pb2 as admin
from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1 import model_service_pb2 as models_pb

ResponseT = TypeVar("ResponseT", bound=Message)
ResultT = TypeVar("ResultT")
ValueT = TypeVar("ValueT")

_INFERENCE = "/octavo.scheduler.v1.InferenceService/"
_MODELS = "/octavo.scheduler.v1.ModelService/"
_ADMIN = "/octavo.scheduler.v1.AdminService/"


@dataclass(frozen=True, slots=True)
class Call(Generic[ResponseT, ResultT]):
    """One call that is about to be made.

    Attributes:
        method: full gRPC name.
        convert: from a response to what the user gets.
    """

    method: str
    request: Message
    response_type: type[ResponseT]
    convert: Callable[[ResponseT], ResultT]


def generate(prompt: Prompt, options: GenerateOptions) -> Call[pb.GenerateResponse, Completion]:
    """The whole answer in one message."""
    return Call(_INFERENCE + "Generate", generate_request(prompt, options), pb.GenerateResponse, _completion)


def stream(prompt: Prompt, options: GenerateOptions) -> Call[pb.StreamGenerateResponse, list[Event]]:
    """The answer as it comes; one converter per call, because it remembers how samples ended."""
    request = pb.StreamGenerateRequest(generation=generate_request(prompt, options))
    return Call(_INFERENCE + "StreamGenerate", request, pb.StreamGenerateResponse, _StreamConverter(options.get("n", 1)))


def cancel(request_id: str) -> Call[pb.CancelGenerationResponse, bool]:
    """Ends a request."""
    request = pb.CancelGenerationRequest()
    set_field(request, "request_id", request_id)
    return Call(_INFERENCE + "CancelGeneration", request, pb.CancelGenerationResponse, lambda r: r.cancelled)


def tokenize(prompt: Prompt, model: str) -> Call[pb.TokenizeResponse, Tokens]:
    """Text or a conversation to token ids."""
    request = pb.TokenizeRequest()
    set_field(request, "model", model)
    set_prompt(request, prompt)
    return Call(_INFERENCE + "Tokenize", request, pb.TokenizeResponse, lambda r: Tokens(tuple(r.token_ids), r.text))


def detokenize(token_ids: Sequence[int], model: str, skip_special_tokens: bool) -> Call[pb.DetokenizeResponse, str]:
    """Token ids to text."""
    request = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    set_field(request, "model", model)
    set_field(request, "token_ids", token_ids)
    return Call(_INFERENCE + "Detokenize", request, pb.DetokenizeResponse, lambda r: r.text)


def list_models(page_token: str) -> Call[models_pb.ListModelsResponse, tuple[list[Model], str]]:
    """A page of models, and the token of the next page ("" at the end)."""
    request = models_pb.ListModelsRequest(page_token=page_token)
    return Call(_MODELS + "ListModels", request, models_pb.ListModelsResponse, _models)


def server_info() -> Call[admin.GetServerInfoResponse, load.ServerInfo]:
    """Version, settings and peers."""
    return Call(_ADMIN + "GetServerInfo", admin.GetServerInfoRequest(), admin.GetServerInfoResponse, _server_info)


def get_load() -> Call[admin.GetLoadResponse, load.Load]:
    """The load of now."""
    return Call(_ADMIN + "GetLoad", admin.GetLoadRequest(), admin.GetLoadResponse, lambda r: _load(r.load))


def watch_load(interval_s: float) -> Call[admin.WatchLoadResponse, list[load.Load]]:
    """The load every interval."""
    request = admin.WatchLoadRequest()
    try:
        request.interval.FromNanoseconds(int(interval_s * 1e9))
    except (ValueError, OverflowError) as error:
        raise InvalidParameter("interval_s", str(error)) from error
    return Call(_ADMIN + "WatchLoad", request, admin.WatchLoadResponse, lambda r: [_load(r.load)])


def flush_cache(include_store: bool) -> Call[admin.FlushCacheResponse, load.Flushed]:
    """Forgets cached prefixes."""
    request = admin.FlushCacheRequest(include_store=include_store)
    return Call(_ADMIN + "FlushCache", request, admin.FlushCacheResponse, lambda r: _plain(load.Flushed, r))


def add_executor(address: str) -> Call[admin.AddExecutorResponse, load.ExecutorStatus]:
    """An executor joins."""
    request = admin.AddExecutorRequest()
    set_field(request, "address", address)
    return Call(_ADMIN + "AddExecutor", request, admin.AddExecutorResponse, lambda r: _executor_status(r.executor))


def remove_executor(address: str, drain_s: float) -> Call[admin.RemoveExecutorResponse, load.ExecutorStatus]:
    """An executor leaves."""
    request = admin.RemoveExecutorRequest()
    set_field(request, "address", address)
    try:
        request.drain.FromNanoseconds(int(drain_s * 1e9))
    except (ValueError, OverflowError) as error:
        raise InvalidParameter("drain_s", str(error)) from error
    return Call(_ADMIN + "RemoveExecutor", request, admin.RemoveExecutorResponse, lambda r: _executor_status(r.executor))


class _StreamConverter:
    """Turns the responses of one stream into events; Finished comes with the response that carries the timing."""

    def __init__(self, num_samples: int):
        self._finishes: dict[int, Finish] = {}
        self._num_samples = num_samples

    def __call__(self, response: pb.StreamGenerateResponse) -> list[Event]:
        events: list[Event] = []
        for delta in response.deltas:
            if delta.text or delta.token_ids or delta.logprobs:
                events.append(TextDelta(delta.index, delta.text, tuple(delta.token_ids), _logprobs(delta)))
            if delta.finish_reason:
                self._finishes[delta.index] = _finish(delta)
        if response.HasField("timing"):
            missing = Finish(FinishReason.ERROR, error_message="the server did not say how this sample ended")
            finishes = tuple(self._finishes.get(index, missing) for index in range(self._num_samples))
            events.append(Finished(response.request_id, finishes, _usage(response.usage), _plain(Timing, response.timing)))
        return events


_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


def _finish(delta: pb.Delta) -> Finish:
    return Finish(
        reason=_REASONS.get(delta.finish_reason, FinishReason.ERROR),
        stop_token_id=delta.stop_token_id if delta.HasField("stop_token_id") else None,
        stop_str=delta.stop_str if delta.HasField("stop_str") else None,
        error_message=delta.error_message,
    )


def _logprobs(delta: pb.Delta) -> tuple[answers.PositionLogprobs, ...]:
    return tuple(
        answers.PositionLogprobs(
            chosen=_plain(answers.TokenLogprob, position.chosen),
            top=tuple(_plain(answers.TokenLogprob, entry) for entry in position.top),
        )
        for position in delta.logprobs
    )


def _completion(response: pb.GenerateResponse) -> Completion:
    samples = tuple(Sample(d.text, _finish(d), tuple(d.token_ids), _logprobs(d)) for d in response.outputs)
    return Completion(response.request_id, samples, _usage(response.usage), _plain(Timing, response.timing))


def _usage(usage: pb.Usage) -> Usage:
    return _plain(Usage, usage, cached_tokens_by_tier=dict(usage.cached_tokens_by_tier))


def _models(response: models_pb.ListModelsResponse) -> tuple[list[Model], str]:
    found = [_plain(Model, model, eos_token_ids=tuple(model.eos_token_ids)) for model in response.models]
    return found, response.next_page_token


def _tiers(tiers: Sequence[admin.TierLoad]) -> tuple[load.TierLoad, ...]:
    return tuple(_plain(load.TierLoad, tier) for tier in tiers)


def _load(message: admin.Load) -> load.Load:
    return _plain(
        load.Load,
        message,
        executors=tuple(_plain(load.ExecutorLoad, executor) for executor in message.executors),
        tiers=_tiers(message.tiers),
        degraded=dict(message.degraded),
        cached_tokens_by_tier=dict(message.cached_tokens_by_tier),
    )


def _server_info(response: admin.GetServerInfoResponse) -> load.ServerInfo:
    kvstore = response.kvstore
    return load.ServerInfo(
        version=response.version,
        uptime_s=response.uptime_s,
        settings=dict(response.settings),
        executors=tuple(_executor_status(executor) for executor in response.executors),
        kvstore=_plain(load.KvStoreStatus, kvstore, tiers=_tiers(kvstore.tiers)) if response.HasField("kvstore") else None,
    )


def _executor_status(executor: admin.ExecutorStatus) -> load.ExecutorStatus:
    return _plain(load.ExecutorStatus, executor, memory_bytes=dict(executor.memory_bytes))


def _plain(value_type: type[ValueT], message: Message, **converted: Any) -> ValueT:
    """A dataclass filled from the message's fields of the same names; those that need more work are given converted."""
    names = [f.name for f in fields(value_type) if f.name not in converted]  # type: ignore[arg-type]
    return value_type(**{name: getattr(message, name) for name in names}, **converted)
