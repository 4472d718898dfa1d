"""OctavoError to google.rpc.Status and back: AIP-193, exactly one ErrorInfo each.

Knows the error tree and the shape of a status. Knows no service.
"""

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from common import errors

DOMAIN = "octavo"
# A status travels in the trailers twice, once with three bytes per byte; gRPC drops calls with more than 8 KiB of them.
_MAX_MESSAGE_BYTES = 1000
_MAX_VALUE_BYTES = 200
_REASONS: dict[str, type[errors.OctavoError]] = {}


def _register(error_class: type[errors.OctavoError]) -> None:
    _REASONS[error_class.reason] = error_class
    for subclass in error_class.__subclasses__():
        _register(subclass)


_register(errors.OctavoError)


def to_status(error: errors.OctavoError) -> status_pb2.Status:
    """The wire form of an error."""
    message = _clipped(error.message, _MAX_MESSAGE_BYTES)
    metadata = {name: _clipped(value, _MAX_VALUE_BYTES) for name, value in error.metadata.items()}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    packed: list[any_pb2.Any] = []
    if isinstance(error, errors.InvalidParameter):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=metadata["field"], description=_clipped(error.problem, _MAX_VALUE_BYTES)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.ModelNotFound):
        details.append(error_details_pb2.ResourceInfo(resource_type="model", resource_name=metadata.get("model", "")))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        any_detail = any_pb2.Any()
        any_detail.Pack(detail)
        packed.append(any_detail)
    return status_pb2.Status(code=error.code.value, message=message, details=packed)


def _clipped(text: str, max_bytes: int) -> str:
    """Short enough, and without what UTF-8 cannot hold."""
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= max_bytes else f"{data[:max_bytes].decode(errors='ignore')}…"


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: errors.OctavoError) -> NoReturn:
    """Ends the call with the error's status."""
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort returns by raising")


def from_rpc_error(error: grpc.RpcError) -> errors.OctavoError:
    """The error that a peer sent; an Unavailable for a peer that could not be reached; a plain OctavoError otherwise.

    A size limit or a concurrency limit of the gRPC library itself carries no ErrorInfo and comes back as Overloaded.
    """
    message = error.details() or str(error) if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else str(error)
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    status = None
    if isinstance(error, grpc.aio.AioRpcError):
        # rpc_status.from_call expects the synchronous Call; the aio error has the same metadata.
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
    elif isinstance(error, grpc.Call):
        status = rpc_status.from_call(error)
    if status is not None:
        return from_status(status)
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return errors.Unavailable(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.Overloaded(message)
        case grpc.StatusCode.CANCELLED:
            return errors.Cancelled(message)
        case _:
            return errors.OctavoError(message)


def from_status(status: status_pb2.Status) -> errors.OctavoError:
    """The error of a wire form; a plain OctavoError when its reason is not known here."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    error_class = _REASONS.get(info.reason, errors.OctavoError)
    metadata = dict(info.metadata)
    if issubclass(error_class, errors.InvalidParameter):
        field = metadata.get("field", "")
        return error_class(field, status.message.removeprefix(f"{field}: "), metadata=metadata)
    return error_class(status.message, metadata=metadata, retry_after_s=retry_after_s)


def code_name(error: errors.OctavoError) -> str:
    """The name of an error's status code, for example "INVALID_ARGUMENT"."""
    return error.code.name
