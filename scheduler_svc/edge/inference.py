"""InferenceService: messages in, engine calls, messages out. Decides nothing; whatever ends a call ends its request.

A client's cancel, its death and a deadline all arrive as CancelledError in the handler, whose last act is to cancel.
"""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from common.errors import InvalidParameter
from common.ids import RequestId
from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1 import inference_service_pb2_grpc as pb_grpc
from scheduler_svc.edge import answers, validation
from scheduler_svc.edge.callers import ANYBODY, Callers
from scheduler_svc.edge.engine import EdgeEngine
from scheduler_svc.edge.output import RequestOutput
from scheduler_svc.edge.pacing import Pacing, stream_phase
from scheduler_svc.edge.preparation import Preparation
from scheduler_svc.edge.session import Session
from scheduler_svc.generation import Generation
from scheduler_svc.text.model_text import ModelText

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """See the module's first lines."""

    def __init__(self, engine: EdgeEngine, text: ModelText, preparation: Preparation, pacing: Pacing, callers: Callers = ANYBODY):
        self._callers = callers
        self._pacing = pacing
        self._engine = engine
        self._text = text
        self._preparation = preparation
        self._stream_numbers = itertools.count()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:  # noqa: N802
        """The whole answer in one message."""
        generation, output = await self.start(request, self._tenant(context), is_streamed=False)
        try:
            deltas = await output.read()
            if output.error is not None:
                raise output.error
            return answers.whole_message(generation, deltas, with_token_ids=self._with_token_ids(request))
        finally:
            self._engine.abandon(generation)

    async def StreamGenerate(  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        """The answer as it comes."""
        generation, output = await self.start(request.generation, self._tenant(context), is_streamed=True)
        try:
            async for message in self.messages(generation, output, request.generation):
                yield message
        finally:
            self._engine.abandon(generation)

    async def GenerateSession(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.GenerateSessionRequest], context: Context
    ) -> AsyncIterator[pb.GenerateSessionResponse]:
        """Many requests on one stream."""
        session = Session(self, self._engine, self._tenant(context))
        try:
            async for response in session.run(request_iterator):
                yield response
        finally:
            session.cancel_all()

    async def CancelGeneration(self, request: pb.CancelGenerationRequest, context: Context) -> pb.CancelGenerationResponse:  # noqa: N802
        """Ends a request by its id."""
        if not request.request_id:
            raise InvalidParameter("request_id", "is empty")
        cancelled = await self._engine.cancel_generation(RequestId(request.request_id))
        return pb.CancelGenerationResponse(cancelled=cancelled)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Text or chat to token ids."""
        self._check_model(request.model)
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidParameter("input", "exactly one of text and chat must be set")
        token_ids, text = await self._preparation.tokenize(
            request.text if kind == "text" else None, request.chat if kind == "chat" else None, self._max_context_tokens
        )
        return pb.TokenizeResponse(token_ids=token_ids, text=text)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Token ids to text."""
        self._check_model(request.model)
        if self._text.tokenizer is None or self._text.spec is None:
            raise InvalidParameter("token_ids", "the model has no tokenizer")
        validation.check_detokenize(request.token_ids, self._text.spec.vocab_size)
        skip = request.skip_special_tokens
        return pb.DetokenizeResponse(text=self._text.tokenizer.decode(request.token_ids, skip_special_tokens=skip))

    async def start(self, message: pb.GenerateRequest, tenant: str, *, is_streamed: bool) -> tuple[Generation, RequestOutput]:
        """Queues a request of a tenant.

        Raises:
            OctavoError: it is refused.
        """
        model = await self._engine.served_model()
        request, output = await self._preparation.prepare(message, model, is_streamed=is_streamed, tenant=tenant)
        return await self._engine.submit(request, output), output

    async def messages(
        self, generation: Generation, output: RequestOutput, message: pb.GenerateRequest
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        """The answer of a request as it comes; the last message carries the timing.

        Raises:
            OctavoError: the request failed.
        """
        with_token_ids = self._with_token_ids(message)
        gather_s, share = 0.0, stream_phase(next(self._stream_numbers))
        while True:
            deltas = await output.read(gather_s)
            is_last = output.is_read
            yield answers.stream_message(generation, deltas, with_token_ids=with_token_ids, is_last=is_last)
            if is_last:
                return
            gather_s, share = share * self._pacing.message_interval_s(self._engine.num_open_requests), 1.0

    def _tenant(self, context: Context) -> str:
        return self._callers.tenant(context.invocation_metadata())

    def _with_token_ids(self, message: pb.GenerateRequest) -> bool:
        return message.output.return_token_ids or self._text.tokenizer is None

    def _check_model(self, asked: str) -> None:
        served = self._engine.model.model if self._engine.model is not None else None
        if served is None and self._text.spec is not None:
            served = self._text.spec.name
        validation.check_model(asked, served or "")

    @property
    def _max_context_tokens(self) -> int:
        return self._text.spec.max_model_len if self._text.spec is not None else 0
