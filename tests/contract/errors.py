"""What a client sees of an error: code, details."""

from dataclasses import dataclass, field

import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2


@dataclass(frozen=True)
class Seen:
    """The status of a failed call; error details by message type."""

    code: grpc.StatusCode
    message: str
    infos: list[error_details_pb2.ErrorInfo] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    has_retry_delay: bool = False

    @property
    def reason(self) -> str:
        """Of the one ErrorInfo."""
        assert len(self.infos) == 1, f"{len(self.infos)} ErrorInfo in {self}"
        assert self.infos[0].domain == "octavo"
        return str(self.infos[0].reason)


def seen(error: grpc.aio.AioRpcError) -> Seen:
    """Reads a status as any gRPC client would."""
    details: list[any_pb2.Any] = []
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            status = status_pb2.Status.FromString(value)
            assert (status.code, status.message) == (error.code().value[0], error.details())
            details += status.details
    infos, violations, has_retry_delay = [], [], False
    for detail in details:
        info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            infos.append(info)
        elif detail.Unpack(request):
            violations += [violation.field for violation in request.field_violations]
        has_retry_delay |= detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)
    return Seen(error.code(), error.details() or "", infos, violations, has_retry_delay)
