"""Requests, updates and errors to messages of the line, and back. Knows both shapes; decides nothing."""

from collections.abc import Sequence

from google.rpc import status_pb2

from common.block_hash import KEY_BYTES
from common.errors import OctavoError
from common.ids import BlockKey, RequestId
from common.rpc.status import from_status, to_status
from common.token_ids import pack_token_ids, unpack_token_ids
from octavo.scheduler.v1 import edge_line_pb2 as pb
from octavo.types.v1 import types_pb2
from scheduler_svc.core.plan import SequenceUpdate
from scheduler_svc.core.request import Request, SamplingParams, ServiceClass, StopConditions


def submit_message(first_sample: int, request: Request) -> pb.SubmitRequest:
    """A request on its way to the engine."""
    sampling = request.sampling
    return pb.SubmitRequest(
        first_sample=first_sample,
        request_id=request.request_id,
        prompt_token_ids=pack_token_ids(request.prompt_token_ids),
        sampling=types_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            logit_bias=sampling.logit_bias,
        ),
        num_logprobs=sampling.num_logprobs,
        max_tokens=request.stop.max_tokens,
        min_tokens=request.stop.min_tokens,
        stop_token_ids=sorted(request.stop.stop_token_ids),
        root_key=request.root_key,
        prompt_keys=None if request.prompt_keys is None else b"".join(request.prompt_keys),
        arrival_s=request.arrival_s,
        n=request.n,
        queue_deadline_s=request.queue_deadline_s,
        tenant=request.tenant,
        service_class=request.service_class.value,  # type: ignore[arg-type]
        priority=request.priority,
        ttft_target_s=request.ttft_target_s,
        tpot_target_s=request.tpot_target_s,
        deadline_s=request.deadline_s,
    )


def submitted_request(message: pb.SubmitRequest) -> Request:
    """What submit_message was made of."""
    sampling = message.sampling
    keys = message.prompt_keys
    return Request(
        request_id=RequestId(message.request_id),
        prompt_token_ids=tuple(unpack_token_ids(message.prompt_token_ids)),
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            logit_bias=dict(sampling.logit_bias),
            num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        ),
        stop=StopConditions(message.max_tokens, message.min_tokens, frozenset(message.stop_token_ids)),
        root_key=BlockKey(message.root_key),
        arrival_s=message.arrival_s,
        n=message.n,
        queue_deadline_s=message.queue_deadline_s if message.HasField("queue_deadline_s") else None,
        prompt_keys=(
            tuple(BlockKey(keys[start : start + KEY_BYTES]) for start in range(0, len(keys), KEY_BYTES))
            if message.HasField("prompt_keys")
            else None
        ),
        tenant=message.tenant,
        service_class=ServiceClass(message.service_class),
        priority=message.priority,
        ttft_target_s=message.ttft_target_s if message.HasField("ttft_target_s") else None,
        tpot_target_s=message.tpot_target_s if message.HasField("tpot_target_s") else None,
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
    )


def sample_news(sample: int, update: SequenceUpdate, logprobs: Sequence[types_pb2.PositionLogprobs]) -> pb.SampleNews:
    """An update that is more than a token."""
    return pb.SampleNews(
        sample=sample,
        token_ids=update.token_ids,
        logprobs=logprobs,
        finish_reason=update.finish_reason.value if update.finish_reason is not None else "",
        stop_token_id=update.stop_token_id,
        error_message=update.error_message,
    )


def error_bytes(error: OctavoError) -> bytes:
    """An error on its way to the other end."""
    status: bytes = to_status(error).SerializeToString()
    return status


def error_of(status: bytes) -> OctavoError:
    """What error_bytes was made of."""
    return from_status(status_pb2.Status.FromString(status))
