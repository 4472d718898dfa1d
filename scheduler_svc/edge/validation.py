"""Every limit of octavo.scheduler.v1, checked before anything is queued. Pure: messages in, errors out, no I/O.

An error names the field as the proto spells it, the value and the limit.
"""

import math
from collections.abc import Sequence

from common.errors import InvalidParameter, ModelNotFound, PromptTooLong
from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.types.v1 import types_pb2

MAX_SAMPLES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_REQUEST_ID_CHARACTERS = 128
MAX_CACHE_SALT_BYTES = 256
MAX_LOGIT_BIAS = 1024
MAX_PRIORITY = 1000
_ROLES = ("system", "user", "assistant")


def check_generate(message: pb.GenerateRequest, vocab_size: int, *, has_tokenizer: bool) -> None:
    """Everything that can be said without the prompt's tokens.

    Raises:
        InvalidParameter: a field is out of its range.
    """
    if message.WhichOneof("prompt") is None:
        raise InvalidParameter("prompt", "exactly one of text, token_ids and chat must be set")
    if len(message.request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidParameter("request_id", f"has {len(message.request_id)} characters, at most {MAX_REQUEST_ID_CHARACTERS}")
    if len(message.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise InvalidParameter("cache_salt", f"is longer than {MAX_CACHE_SALT_BYTES} bytes of UTF-8")
    if message.HasField("n"):
        _check_range("n", message.n, 1, MAX_SAMPLES)
    if message.HasField("queue_timeout") and message.queue_timeout.ToNanoseconds() < 0:
        raise InvalidParameter("queue_timeout", "is negative, at least 0 s")
    _check_qos(message.qos)
    _check_sampling(message.sampling, vocab_size)
    _check_stopping(message.stopping, vocab_size, has_tokenizer=has_tokenizer)
    if message.output.HasField("logprobs"):
        _check_range("output.logprobs", message.output.logprobs, 0, MAX_LOGPROBS)
    if message.output.echo and not has_tokenizer:
        raise InvalidParameter("output.echo", "the model has no tokenizer, so there is no text")


def check_chat(chat: pb.Chat) -> None:
    """A conversation's shape.

    Raises:
        InvalidParameter: no message, or a role that does not exist.
    """
    if not chat.messages:
        raise InvalidParameter("chat.messages", "is empty, at least one message")
    for i, turn in enumerate(chat.messages):
        if turn.role not in _ROLES:
            raise InvalidParameter(f"chat.messages[{i}].role", f"{turn.role[:40]!r}, must be one of {', '.join(_ROLES)}")


def check_text_size(field: str, text: str, max_context_tokens: int, longest_token_bytes: int) -> None:
    """Refuses a text that cannot fit the context however it is tokenised, before any work goes into it.

    Raises:
        InvalidParameter: it is empty.
        PromptTooLong.
    """
    if not text:
        raise InvalidParameter(field, "the prompt is empty, at least one token")
    least_tokens = len(text) // longest_token_bytes
    if least_tokens > max_context_tokens:
        raise _too_long(field, f"at least {least_tokens} tokens", least_tokens, max_context_tokens)


def check_context(field: str, num_prompt_tokens: int, max_tokens: int | None, max_context_tokens: int) -> None:
    """Whether prompt and output fit the model.

    Args:
        field: the prompt's.
        num_prompt_tokens: of the prompt.
        max_tokens: what was asked for; None: as many as fit.
        max_context_tokens: of the model.

    Raises:
        InvalidParameter: the prompt is empty.
        PromptTooLong.
    """
    if num_prompt_tokens == 0:
        raise InvalidParameter(field, "the prompt is empty, at least one token")
    if num_prompt_tokens >= max_context_tokens:
        raise _too_long(field, f"{num_prompt_tokens} tokens and room for one more", num_prompt_tokens, max_context_tokens)
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_context_tokens:
        sizes = f"{num_prompt_tokens} tokens and max_tokens {max_tokens}"
        raise _too_long(field, sizes, num_prompt_tokens, max_context_tokens)


def check_model(asked: str, served: str) -> None:
    """Whether the model that a client asks for is the one that is served; empty asks for any.

    Raises:
        ModelNotFound.
    """
    if asked and asked.removeprefix("models/") != served.removeprefix("models/"):
        shown = asked[:200]
        raise ModelNotFound(f"model: {shown!r} is not served here; {served!r} is", metadata={"model": shown})


def checked_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> list[int]:
    """A prompt's token ids, copied once: a field of a message costs as much at each look as a list does in all.

    Raises:
        InvalidParameter: one is not in the vocabulary.
    """
    token_ids = list(ids[:])
    _check_token_ids(field, token_ids, vocab_size)
    return token_ids


def check_detokenize(token_ids: Sequence[int], vocab_size: int) -> None:
    """Token ids that are to become text.

    Raises:
        InvalidParameter: one of them is not in the vocabulary.
    """
    _check_token_ids("token_ids", token_ids, vocab_size)


def _check_qos(qos: pb.QosSpec) -> None:
    if qos.service_class not in pb.ServiceClass.values():
        names = ", ".join(pb.ServiceClass.keys()[1:])
        raise InvalidParameter("qos.service_class", f"{qos.service_class} is no class, must be one of {names}")
    _check_range("qos.priority", qos.priority, -MAX_PRIORITY, MAX_PRIORITY)
    for name in ("ttft_target", "tpot_target", "deadline"):
        if qos.HasField(name) and getattr(qos, name).ToNanoseconds() <= 0:
            raise InvalidParameter(f"qos.{name}", f"{getattr(qos, name).ToNanoseconds() / 1e9:g} s is out of range, above 0 s")


def _check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if len(ids) and max(ids) >= vocab_size:
        position = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        raise InvalidParameter(f"{field}[{position}]", f"{ids[position]} is not below the vocabulary size {vocab_size}")


def _check_sampling(sampling: types_pb2.SamplingParams, vocab_size: int) -> None:
    ranges: dict[str, tuple[float, float]] = {
        "temperature": (0, 2), "min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    }  # fmt: skip
    for name, (low, high) in ranges.items():
        if sampling.HasField(name):  # type: ignore[arg-type]
            _check_range(f"sampling.{name}", getattr(sampling, name), low, high)
    for name, high in {"top_p": 1, "repetition_penalty": 2}.items():
        if sampling.HasField(name):  # type: ignore[arg-type]
            value = getattr(sampling, name)
            if not 0 < value <= high:  # also refuses NaN
                raise InvalidParameter(f"sampling.{name}", f"{value:g} is out of range, above 0 and at most {high}")
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidParameter("sampling.logit_bias", f"has {len(sampling.logit_bias)} entries, at most {MAX_LOGIT_BIAS}")
    for token_id, bias in sampling.logit_bias.items():
        if token_id >= vocab_size:
            raise InvalidParameter("sampling.logit_bias", f"token id {token_id} is not below the vocabulary size {vocab_size}")
        _check_range(f"sampling.logit_bias[{token_id}]", bias, -100, 100)


def _check_stopping(stopping: pb.StoppingCriteria, vocab_size: int, *, has_tokenizer: bool) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens == 0:
        raise InvalidParameter("stopping.max_tokens", "is 0, at least 1")
    if stopping.HasField("max_tokens") and stopping.min_tokens > stopping.max_tokens:
        raise InvalidParameter("stopping.min_tokens", f"{stopping.min_tokens} is above stopping.max_tokens {stopping.max_tokens}")
    if len(stopping.stop) > MAX_STOP_STRINGS:
        raise InvalidParameter("stopping.stop", f"has {len(stopping.stop)} strings, at most {MAX_STOP_STRINGS}")
    if stopping.stop and not has_tokenizer:
        raise InvalidParameter("stopping.stop", "the model has no tokenizer, so there is no text to stop at")
    for i, text in enumerate(stopping.stop):
        if not 1 <= len(text.encode()) <= MAX_STOP_BYTES:
            raise InvalidParameter(
                f"stopping.stop[{i}]", f"has {len(text.encode())} bytes of UTF-8, at least 1 and at most {MAX_STOP_BYTES}"
            )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidParameter("stopping.stop_token_ids", f"has {len(stopping.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS}")
    _check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if math.isnan(value) or not low <= value <= high:
        raise InvalidParameter(field, f"{value:g} is out of range, at least {low:g} and at most {high:g}")


def _too_long(field: str, sizes: str, num_prompt_tokens: int, max_context_tokens: int) -> PromptTooLong:
    return PromptTooLong(
        field,
        f"{sizes} exceed the model's context of {max_context_tokens} tokens",
        metadata={"promptTokens": str(num_prompt_tokens), "maxContextTokens": str(max_context_tokens)},
    )
