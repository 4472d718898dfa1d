"""A request and a step's work as records, and back. Knows both shapes; what stands for tokens: outlines.py."""

from common.ids import BlockKey, RequestId
from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.core.request import Request, SamplingParams, ServiceClass, StopConditions
from scheduler_svc.core.step_time import StepWork
from scheduler_svc.recording.outlines import Outline
from scheduler_svc.recording.plain_fields import PlainFields

_REQUEST = PlainFields(
    Request,
    pb.Add,
    # By a number, as outlines, by what stands for it, and an enum; keys come from prompts; how tokens are drawn decides nothing.
    elsewhere=(
        "request_id", "prompt_token_ids", "generated", "root_key", "tenant", "stop", "service_class", "prompt_keys", "sampling",
    ),
)  # fmt: skip
_STOP = PlainFields(
    StopConditions,
    pb.Add,
    elsewhere=("stop_token_ids", "min_tokens"),  # a token is said to be a stop token when it is drawn, which is never too early
)
_WORK = PlainFields(StepWork, pb.Sent)


def write_request(request: Request, add: pb.Add) -> None:
    """All that is no token and no name."""
    _REQUEST.write(request, add)
    _STOP.write(request.stop, add)
    add.service_class = request.service_class


def request_of(add: pb.Add, block_size: int, stops: set[int]) -> Request:
    """A recorded request.

    Args:
        add: its record.
        block_size: of its core.
        stops: its stop tokens; those that end it are put in when they come.
    """
    samples = [token_ids_of(sample, block_size) if sample.num_tokens else None for sample in add.samples]
    num_prompt_tokens = add.prompt.num_tokens
    return Request(
        request_id=RequestId(str(add.request)),
        prompt_token_ids=token_ids_of(add.prompt, block_size),
        sampling=SamplingParams(),
        stop=StopConditions(stop_token_ids=stops, **_STOP.read(add)),  # type: ignore[arg-type]  # it grows, see above
        root_key=BlockKey(add.root.to_bytes(8, "little") * 4),
        generated=tuple(None if tokens is None else tokens[num_prompt_tokens:] for tokens in samples),
        tenant=add.tenant,
        service_class=ServiceClass(add.service_class),
        **_REQUEST.read(add),
    )


def token_ids_of(outline: pb.Outline, block_size: int) -> tuple[int, ...]:
    """Substitutes for the tokens of an outline."""
    return Outline(outline.num_tokens, tuple(outline.blocks), outline.tail).token_ids(block_size)


def sent_of(work: StepWork, now_s: float) -> pb.Sent:
    """The record of a step that was sent."""
    sent = pb.Sent(now_s=now_s)
    _WORK.write(work, sent)
    return sent


def work_of(sent: pb.Sent) -> StepWork:
    """What a recorded step computed."""
    return StepWork(**_WORK.read(sent))
