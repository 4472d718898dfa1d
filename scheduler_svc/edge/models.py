"""ModelService: what can be asked for. Knows what the engine serves and the model's text side."""

from typing import Any

import grpc.aio

from common.errors import InvalidParameter
from octavo.scheduler.v1 import model_service_pb2 as pb
from octavo.scheduler.v1 import model_service_pb2_grpc as pb_grpc
from scheduler_svc.edge.engine import EdgeEngine
from scheduler_svc.text.model_text import ModelText

Context = grpc.aio.ServicerContext[Any, Any]


class ModelServicer(pb_grpc.ModelServiceServicer):
    """One model a server, so there is one page."""

    def __init__(self, engine: EdgeEngine, text: ModelText, model_name: str):
        self._engine = engine
        self._text = text
        self._model_name = model_name

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        """All models, in order of name."""
        if request.page_token:
            raise InvalidParameter("page_token", "is not of this server")
        info, spec = self._engine.model, self._text.spec
        if info is None and spec is None:
            return pb.ListModelsResponse()
        num_executors = await self._engine.num_connected_executors()
        model = pb.Model(
            name=info.model if info is not None else self._model_name or (spec.name if spec is not None else ""),
            dtype=info.dtype if info is not None else "",
            ready=num_executors > 0,
            num_executors=num_executors,
            has_tokenizer=self._text.tokenizer is not None,
            has_chat_template=self._text.chat_template is not None,
            eos_token_ids=sorted(spec.eos_token_ids) if spec is not None else (),
        )
        if info is not None:
            model.max_context_tokens, model.vocab_size = info.max_model_len, info.vocab_size
        elif spec is not None:
            model.max_context_tokens, model.vocab_size = spec.max_model_len, spec.vocab_size
        return pb.ListModelsResponse(models=[model])
