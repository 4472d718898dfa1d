"""What a client asks for: prompts and options, and the request messages made of them.

Knows the wire's messages. Checks only what a message cannot hold (a negative token id, text that is no Unicode); ranges are
the server's to check, which names the field and the limit as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from google.protobuf.message import Message

from octavo.errors import InvalidParameter
from octavo.scheduler.v1 import inference_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; role is "system", "user" or "assistant"."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text (tokenised as it is), token ids, or a conversation (put through the model's chat template)."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of generate and stream; one that is not given takes the model's or the server's default.

    Sampling: temperature (0 = greedy), top_p, top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty, seed,
    logit_bias by token id. End: max_tokens, min_tokens, stop strings, stop_token_ids, ignore_eos,
    include_stop_str_in_output. Output: logprobs, return_token_ids, skip_special_tokens, echo. n: parallel samples.
    model: "models/{model}". request_id: for cancel. cache_salt: requests of different salts share no cached prefix.
    queue_timeout_s: longest wait for a place in the batch. timeout_s: deadline of the whole call. Quality of service:
    service_class ("interactive", "standard", "batch"), priority inside it (lower runs first), ttft_target_s, tpot_target_s,
    deadline_s (from arrival to the end).
    """

    model: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    logprobs: int
    return_token_ids: bool
    skip_special_tokens: bool
    echo: bool
    n: int
    request_id: str
    cache_salt: str
    queue_timeout_s: float
    timeout_s: float
    service_class: str
    priority: int
    ttft_target_s: float
    tpot_target_s: float
    deadline_s: float


# Which part of a GenerateRequest holds an option; the rest are fields of the request itself.
_PARTS: dict[str, str] = {
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
        "sampling",
    ),
    "logit_bias": "sampling",
    **dict.fromkeys(
        ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
        "stopping",
    ),
    **dict.fromkeys(("logprobs", "return_token_ids", "skip_special_tokens", "echo"), "output"),
    "priority": "qos",
    "model": "",
    "n": "",
    "request_id": "",
    "cache_salt": "",
}


# Which part of a GenerateRequest holds an option that is a duration.
_DURATIONS = {"queue_timeout_s": "", "ttft_target_s": "qos", "tpot_target_s": "qos", "deadline_s": "qos"}


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The message for a prompt and options.

    Raises:
        InvalidParameter: a value that the message cannot hold; it names the option.
        TypeError: an option that does not exist.
    """
    request = pb.GenerateRequest()
    set_prompt(request, prompt)
    for name, value in options.items():
        if name == "timeout_s":
            continue
        if name in _DURATIONS:
            part = getattr(request, _DURATIONS[name]) if _DURATIONS[name] else request
            duration = getattr(part, name.removesuffix("_s"))
            _put(name, lambda seconds=value, duration=duration: duration.FromNanoseconds(int(float(seconds) * 1e9)))
            continue
        if name == "service_class":
            _put(name, lambda text=value: setattr(request.qos, "service_class", _service_class(text)))
            continue
        if name not in _PARTS:
            raise TypeError(f"unknown option {name!r}; options are {', '.join(GenerateOptions.__annotations__)}")
        part = getattr(request, _PARTS[name]) if _PARTS[name] else request
        set_field(part, name, [value] if name == "stop" and isinstance(value, str) else value)
    return request


def _service_class(text: str) -> int:
    names = [name.removeprefix("SERVICE_CLASS_").lower() for name in pb.ServiceClass.keys()[1:]]
    if text not in names:
        raise ValueError(f"{text!r} is no class, must be one of {', '.join(names)}")
    return names.index(text) + 1


def set_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    """Fills the prompt of a request: text, token_ids or chat.

    Raises:
        InvalidParameter: the prompt is none of them, or an empty list.
    """
    if isinstance(prompt, str):
        set_field(request, "text", prompt)
    elif not prompt:
        raise InvalidParameter("prompt", "is an empty list; give text, token ids or chat messages")
    elif isinstance(prompt[0], ChatMessage):
        for message in prompt:
            if not isinstance(message, ChatMessage):
                raise InvalidParameter("prompt", "mixes chat messages with something else")
            turn = request.chat.messages.add()
            set_field(turn, "role", message.role)
            set_field(turn, "content", message.content)
    elif isinstance(request, pb.GenerateRequest):
        _put("prompt", lambda: request.token_ids.ids.extend(prompt))  # type: ignore[arg-type]
    else:
        raise InvalidParameter("prompt", "is token ids already; give text or chat messages")


def set_field(message: Message, name: str, value: Any) -> None:
    """Sets a scalar, repeated or map field of any message.

    Raises:
        InvalidParameter: the field cannot hold the value.
    """
    if isinstance(value, Mapping):
        _put(name, lambda: getattr(message, name).update(value))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        _put(name, lambda: getattr(message, name).extend(value))
    else:
        _put(name, lambda: setattr(message, name, value))


def _put(name: str, assign: Any) -> None:
    try:
        assign()
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidParameter(name, str(error)) from error
