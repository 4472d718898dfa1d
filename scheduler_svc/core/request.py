"""What a client asked for, validated and with all defaults filled in. Knows no wire format and no block."""

import enum
from dataclasses import dataclass, field

from common.block_hash import chain_keys
from common.ids import BlockKey, RequestId


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Ranges are those of octavo.types.v1.SamplingParams.

    Attributes:
        seed: of sample 0; sample i of the same request uses seed + i (modulo 2**64).
        num_logprobs: None: no log probabilities; 0: of the chosen token; n: also the n most likely.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a sequence ends by its token ids alone; stop strings are the edge's business.

    Attributes:
        max_tokens: output tokens at most; prompt and max_tokens fit the model's context.
        min_tokens: stop ids cannot be drawn before this many output tokens.
        stop_token_ids: the model's end-of-text ids unless ignored, and those of the request.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


class ServiceClass(enum.IntEnum):
    """Who goes first, and who loses its place when room runs out; lower is more urgent. Values are those of the wire."""

    INTERACTIVE = 1
    STANDARD = 2
    BATCH = 3


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        prompt_token_ids: at least one, each below the vocabulary size.
        root_key: of its chain of block keys, from model fingerprint and salt.
        n: number of parallel samples.
        arrival_s: on the scheduler's clock.
        queue_deadline_s: latest time to be admitted to the batch; None: no limit.
        generated: what another executor drew of each sample before; None for a sample that has ended. Empty: nothing yet.
        prompt_keys: of the prompt's full blocks, by the block size of the executors; None: not computed yet.
        tenant: who pays for it; empty: nobody in particular.
        service_class, priority: how urgent it is; priority is inside the class, lower runs first.
        ttft_target_s: from arrival to its first token, as the client would like it; None: the class's.
        tpot_target_s: between its output tokens; None: none.
        deadline_s: latest time of its end, on the clock of arrival_s; None: no limit.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    root_key: BlockKey
    arrival_s: float
    n: int = 1
    queue_deadline_s: float | None = None
    generated: tuple[tuple[int, ...] | None, ...] = ()
    prompt_keys: tuple[BlockKey, ...] | None = None
    tenant: str = ""
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    deadline_s: float | None = None

    def keys_of_prompt(self, block_size: int) -> list[BlockKey]:
        """Keys of the prompt's full blocks of block_size tokens."""
        if self.prompt_keys is not None:
            return list(self.prompt_keys)
        return chain_keys(self.root_key, self.prompt_token_ids, block_size)


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE = "deadline"
