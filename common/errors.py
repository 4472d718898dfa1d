"""The errors of Octavo, and the gRPC status of each. One tree, one table; nothing else decides a status code.

OctavoError
├── InvalidParameter         bad value in a request; names the field and the limit
│   └── PromptTooLong
├── ModelNotFound
├── KvPoolTooSmall           fits the model but never this deployment
├── Overloaded               try again later
│   ├── QueueFull
│   ├── QuotaExceeded        the tenant has as much as it may have
│   ├── SlowConsumer
│   └── StoreFull
├── QueueTimeout             waited longer than asked
├── DeadlineExceeded
├── Cancelled
├── DuplicateRequest         request_id is in use
├── Unavailable              the only class that clients retry by themselves
│   ├── Draining
│   ├── NoExecutor
│   ├── ExecutorLost
│   └── ModelLoading
├── Unauthenticated
├── PermissionDenied
├── StaleEpoch               the peer restarted: open a new session
├── LeaseExpired
├── ChecksumMismatch
├── NoSharedMemory           the store's memory cannot be mapped here; its inline calls work
├── SequenceFailed           one sequence could not be computed; the others go on
└── StartupError             a process cannot start; the message says what to do. Never on the wire
    └── ModelRefused         this model cannot be served, with the reason
"""

# ruff: noqa: N818 -- the names say what happened; "Error" at the end of each would add nothing.

import enum


class Code(enum.Enum):
    """gRPC status codes by their numeric value, so that this module needs no grpc."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class OctavoError(Exception):
    """Base of all errors of Octavo.

    Attributes:
        code: gRPC status code.
        reason: UPPER_SNAKE reason of the ErrorInfo.
        message: for people; says what was wrong and what the limit is.
        metadata: dynamic values of the message, by lowerCamel name.
        retry_after_s: when trying again makes sense; None if it does not.
    """

    code = Code.INTERNAL
    reason = "INTERNAL"

    def __init__(self, message: str, *, metadata: dict[str, str] | None = None, retry_after_s: float | None = None):
        super().__init__(message)
        self.message = message
        self.metadata = metadata or {}
        self.retry_after_s = retry_after_s


class InvalidParameter(OctavoError):
    """A value of a request is out of its range."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_PARAMETER"

    def __init__(self, field: str, problem: str, *, metadata: dict[str, str] | None = None):
        super().__init__(f"{field}: {problem}", metadata={"field": field, **(metadata or {})})
        self.field = field
        self.problem = problem


class PromptTooLong(InvalidParameter):
    """Prompt, or prompt and max_tokens, exceed the model's context."""

    reason = "PROMPT_TOO_LONG"


class ModelNotFound(OctavoError):
    """No model of that name is served here."""

    code = Code.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class KvPoolTooSmall(OctavoError):
    """The request fits the model, but its KV can never fit this deployment's device pool."""

    code = Code.FAILED_PRECONDITION
    reason = "KV_POOL_TOO_SMALL"


class Overloaded(OctavoError):
    """Something is full for the moment."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "LOAD_SHED"


class QueueFull(Overloaded):
    """The bounded queue of requests is full."""

    reason = "QUEUE_FULL"


class QuotaExceeded(Overloaded):
    """The tenant has, or asks for, more than it may."""

    reason = "QUOTA_EXCEEDED"


class SlowConsumer(Overloaded):
    """A reader fell so far behind that its buffer is full."""

    reason = "SLOW_CONSUMER"


class StoreFull(Overloaded):
    """Every block of the store is held."""

    reason = "STORE_FULL"


class QueueTimeout(OctavoError):
    """The request waited longer than its queue_timeout."""

    code = Code.DEADLINE_EXCEEDED
    reason = "QUEUE_TIMEOUT"


class DeadlineExceeded(OctavoError):
    """The call's deadline has passed."""

    code = Code.DEADLINE_EXCEEDED
    reason = "DEADLINE"


class Cancelled(OctavoError):
    """Cancelled by CancelGeneration."""

    code = Code.CANCELLED
    reason = "CANCELLED_BY_REQUEST"


class DuplicateRequest(OctavoError):
    """A request of this id is running."""

    code = Code.ALREADY_EXISTS
    reason = "REQUEST_ID_IN_USE"


class Unavailable(OctavoError):
    """Not now; the same call may work in a moment or elsewhere."""

    code = Code.UNAVAILABLE
    reason = "UNAVAILABLE"


class Draining(Unavailable):
    """The server is about to stop and takes no new work."""

    reason = "DRAINING"


class NoExecutor(Unavailable):
    """No executor is connected."""

    reason = "NO_EXECUTOR"


class ExecutorLost(Unavailable):
    """The executor of a running request died and nobody took over."""

    reason = "EXECUTOR_LOST"


class ModelLoading(Unavailable):
    """The model is known and being loaded."""

    reason = "MODEL_LOADING"


class Unauthenticated(OctavoError):
    """No token, or a wrong one."""

    code = Code.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(OctavoError):
    """The token does not allow this call."""

    code = Code.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class StaleEpoch(OctavoError):
    """The message was meant for a process that is gone, or a session that is fenced."""

    code = Code.ABORTED
    reason = "STALE_EPOCH"


class LeaseExpired(OctavoError):
    """The lease was given back or taken away."""

    code = Code.ABORTED
    reason = "LEASE_EXPIRED"


class ChecksumMismatch(OctavoError):
    """A block's bytes are not the ones that were written; the block is dropped."""

    code = Code.DATA_LOSS
    reason = "CHECKSUM_MISMATCH"


class NoSharedMemory(OctavoError):
    """The store's shared memory cannot be used from here; the message says why. The inline calls work. Never on the wire."""

    reason = "NO_SHARED_MEMORY"


class SequenceFailed(OctavoError):
    """One sequence could not be computed."""

    reason = "SEQUENCE_FAILED"


class StartupError(OctavoError):
    """A process cannot start."""

    reason = "STARTUP"


class ModelRefused(StartupError):
    """The model cannot be served."""

    reason = "MODEL_REFUSED"
