"""News of a request to messages of octavo.scheduler.v1. Knows both shapes; decides nothing."""

from collections.abc import Iterable, Sequence

from common.errors import OctavoError
from octavo.scheduler.v1 import inference_service_pb2 as pb
from scheduler_svc.core.request import FinishReason
from scheduler_svc.edge.output import SampleDelta
from scheduler_svc.generation import Generation

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


def delta_message(delta: SampleDelta, *, with_token_ids: bool) -> pb.Delta:
    """What is new of one sample."""
    message = pb.Delta(
        index=delta.index,
        text="".join(delta.text),
        token_ids=delta.token_ids if with_token_ids else (),
        logprobs=delta.logprobs,
        finish_reason=pb.FINISH_REASON_UNSPECIFIED if delta.finish_reason is None else _REASONS[delta.finish_reason],
        error_message=delta.error_message,
    )
    if delta.stop_str is not None:
        message.stop_str = delta.stop_str
    elif delta.stop_token_id is not None:
        message.stop_token_id = delta.stop_token_id
    return message


def usage(generation: Generation) -> pb.Usage:
    """Tokens so far."""
    return pb.Usage(
        prompt_tokens=len(generation.request.prompt_token_ids),
        completion_tokens=generation.output.num_tokens,
        cached_tokens=generation.num_cached_tokens,
        cached_tokens_by_tier=generation.cached_tokens_by_tier,
    )


def timing(generation: Generation) -> pb.Timing:
    """Where the time of an ended request went."""
    return pb.Timing(
        queue_s=generation.queue_s,
        time_to_first_token_s=generation.time_to_first_token_s,
        total_s=generation.total_s,
    )


def stream_message(
    generation: Generation, deltas: Sequence[SampleDelta], *, with_token_ids: bool, is_last: bool
) -> pb.StreamGenerateResponse:
    """One message of a stream."""
    return pb.StreamGenerateResponse(
        request_id=generation.request.request_id,
        deltas=[delta_message(delta, with_token_ids=with_token_ids) for delta in deltas],
        usage=usage(generation),
        timing=timing(generation) if is_last else None,
    )


def whole_message(generation: Generation, deltas: Iterable[SampleDelta], *, with_token_ids: bool) -> pb.GenerateResponse:
    """The whole answer."""
    return pb.GenerateResponse(
        request_id=generation.request.request_id,
        outputs=[delta_message(delta, with_token_ids=with_token_ids) for delta in deltas],
        usage=usage(generation),
        timing=timing(generation),
    )


def request_error(request_id: str, error: OctavoError) -> pb.RequestError:
    """An error of one request of a session; what a status would have said."""
    return pb.RequestError(
        request_id=request_id,
        code=error.code.value,
        reason=error.reason,
        message=error.message,
        metadata=error.metadata,
    )
