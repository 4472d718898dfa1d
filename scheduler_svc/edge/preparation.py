"""From a GenerateRequest to what the engine takes: validated, tokenised, defaults filled in. Queues nothing."""

import random
import uuid

from common.block_hash import chain_salt, root_key
from common.clock import Clock
from common.errors import InvalidParameter
from common.ids import RequestId
from octavo.executor.v1 import executor_service_pb2 as executor_pb
from octavo.scheduler.v1 import inference_service_pb2 as pb
from scheduler_svc.core.request import Request, SamplingParams, ServiceClass, StopConditions
from scheduler_svc.core.tenants import EQUALS, Tenants
from scheduler_svc.edge import validation
from scheduler_svc.edge.output import RequestOutput
from scheduler_svc.text.model_text import ModelText
from scheduler_svc.text.sample_text import SampleText
from scheduler_svc.text.stop_strings import StopMatcher, StopPatterns


class Preparation:
    """Prepares requests for one model.

    Args:
        salt: the server's, mixed into every block key.
        tenants: with defaults of their own.
    """

    def __init__(self, text: ModelText, clock: Clock, salt: str = "", tenants: Tenants = EQUALS):
        self._tenants = tenants
        self._text = text
        self._clock = clock
        self._salt = salt
        self._random = random.SystemRandom()

    async def prepare(
        self, message: pb.GenerateRequest, model: executor_pb.ExecutorInfo, *, is_streamed: bool, tenant: str = ""
    ) -> tuple[Request, RequestOutput]:
        """The request and where its tokens go.

        Args:
            message: from the client.
            model: what is served.
            is_streamed: False: the reader wants everything at the end.
            tenant: who pays for it.

        Raises:
            InvalidParameter, PromptTooLong, ModelNotFound.
        """
        arrival_s = self._clock.now()
        validation.check_model(message.model, model.model)
        validation.check_generate(message, model.vocab_size, has_tokenizer=self._text.tokenizer is not None)
        token_ids, prompt_text = await self._prompt(message, model.max_model_len, model.vocab_size)
        stopping = message.stopping
        max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
        field = "token_ids.ids" if message.HasField("token_ids") else str(message.WhichOneof("prompt"))
        validation.check_context(field, len(token_ids), max_tokens, model.max_model_len)
        if max_tokens is None:
            # As many as fit the context, and no more than the device pool could ever hold.
            room = min(model.max_model_len, model.num_blocks * model.block_size)
            max_tokens = max(1, room - len(token_ids))
        eos = self._text.spec.eos_token_ids if self._text.spec is not None and not stopping.ignore_eos else frozenset()
        request = Request(
            request_id=RequestId(message.request_id or str(uuid.uuid4())),
            prompt_token_ids=tuple(token_ids),
            sampling=self._sampling(message),
            stop=StopConditions(
                max_tokens=max_tokens,
                min_tokens=min(stopping.min_tokens, max_tokens),
                stop_token_ids=frozenset(stopping.stop_token_ids) | eos,
            ),
            root_key=root_key(model.kv_fingerprint, chain_salt(self._salt, message.cache_salt, tenant)),
            arrival_s=arrival_s,
            n=message.n if message.HasField("n") else 1,
            queue_deadline_s=(
                arrival_s + message.queue_timeout.ToNanoseconds() / 1e9 if message.HasField("queue_timeout") else None
            ),
            tenant=tenant,
            service_class=self._service_class(message.qos, tenant),
            priority=message.qos.priority,
            ttft_target_s=_seconds(message.qos, "ttft_target"),
            tpot_target_s=_seconds(message.qos, "tpot_target"),
            deadline_s=None if (within_s := _seconds(message.qos, "deadline")) is None else arrival_s + within_s,
        )
        echo = ""
        if message.output.echo:
            echo = self._decode(token_ids, message.output) if prompt_text is None else prompt_text
        return request, self._output(request, message, echo, is_streamed=is_streamed)

    async def tokenize(self, text: str | None, chat: pb.Chat | None, max_context_tokens: int) -> tuple[list[int], str]:
        """Token ids of a text or a conversation, and the text that was tokenised.

        Raises:
            InvalidParameter: neither is set, it is empty, or the model cannot do it.
            PromptTooLong: it cannot fit the context however it is tokenised.
        """
        if self._text.tokenizer is None:
            raise InvalidParameter("text" if chat is None else "chat", "the model has no tokenizer; send token_ids")
        longest_token_bytes = self._text.tokenizer.longest_token_bytes
        if chat is None:
            text = text or ""
            validation.check_text_size("text", text, max_context_tokens, longest_token_bytes)
            return await self._text.encode(text, add_special_tokens=True), text
        validation.check_chat(chat)
        if self._text.chat_template is None:
            raise InvalidParameter("chat", "the model has no chat template; send text or token_ids")
        messages = [{"role": turn.role, "content": turn.content} for turn in chat.messages]
        add_generation_prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        validation.check_text_size(
            "chat", "".join(m["content"] for m in messages) or " ", max_context_tokens, longest_token_bytes
        )
        text = await self._text.render(messages, add_generation_prompt=add_generation_prompt)
        # The template spells out the special tokens.
        return await self._text.encode(text, add_special_tokens=False), text

    async def _prompt(
        self, message: pb.GenerateRequest, max_context_tokens: int, vocab_size: int
    ) -> tuple[list[int], str | None]:
        match message.WhichOneof("prompt"):
            case "token_ids":
                return validation.checked_token_ids("token_ids.ids", message.token_ids.ids, vocab_size), None
            case "chat":
                return await self.tokenize(None, message.chat, max_context_tokens)
            case _:
                return await self.tokenize(message.text, None, max_context_tokens)

    def _sampling(self, message: pb.GenerateRequest) -> SamplingParams:
        wanted = message.sampling
        defaults = self._text.spec.generation_defaults if self._text.spec is not None else {}

        def value(name: str, otherwise: float) -> float:
            return float(getattr(wanted, name)) if wanted.HasField(name) else defaults.get(name, otherwise)  # type: ignore[arg-type]

        return SamplingParams(
            temperature=value("temperature", 1.0),
            top_p=value("top_p", 1.0),
            top_k=int(value("top_k", 0)),
            min_p=value("min_p", 0.0),
            presence_penalty=value("presence_penalty", 0.0),
            frequency_penalty=value("frequency_penalty", 0.0),
            repetition_penalty=value("repetition_penalty", 1.0),
            seed=wanted.seed if wanted.HasField("seed") else self._random.getrandbits(64),
            logit_bias=dict(wanted.logit_bias),
            num_logprobs=message.output.logprobs if message.output.HasField("logprobs") else None,
        )

    def _service_class(self, qos: pb.QosSpec, tenant: str) -> ServiceClass:
        return ServiceClass(qos.service_class) if qos.service_class else self._tenants.terms(tenant).default_class

    def _decode(self, token_ids: list[int], options: pb.OutputOptions) -> str:
        assert self._text.tokenizer is not None
        return self._text.tokenizer.decode(token_ids, skip_special_tokens=skips_special_tokens(options))

    def _output(self, request: Request, message: pb.GenerateRequest, echo: str, *, is_streamed: bool) -> RequestOutput:
        detokenizers = self._text.detokenizers
        patterns = StopPatterns(message.stopping.stop, keep=message.stopping.include_stop_str_in_output)
        samples = [
            SampleText(
                detokenizers.new(request.prompt_token_ids, skip_special_tokens=skips_special_tokens(message.output))
                if detokenizers is not None
                else None,
                StopMatcher(patterns),
                min_tokens=request.stop.min_tokens,
            )
            for _ in range(request.n)
        ]
        keep_stop = message.stopping.include_stop_str_in_output
        return RequestOutput(samples, echo=echo, keep_stop=keep_stop, is_bounded=is_streamed)


def _seconds(qos: pb.QosSpec, name: str) -> float | None:
    duration: float | None = getattr(qos, name).ToNanoseconds() / 1e9 if qos.HasField(name) else None  # type: ignore[arg-type]
    return duration


def skips_special_tokens(options: pb.OutputOptions) -> bool:
    """Whether special tokens stay out of the text; they do unless asked for."""
    return options.skip_special_tokens if options.HasField("skip_special_tokens") else True
