"""Requests that have not ended, and their sequences, by id. Hands out sequence ids and places in the queue."""

from collections.abc import Iterator

from common.block_hash import chain_keys
from common.errors import DuplicateRequest
from common.ids import RequestId, SeqId
from scheduler_svc.core.block_table import BlockTable
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_state import RequestState
from scheduler_svc.core.sequence import Sequence


class RequestTable:
    """See the module's first line.

    Args:
        block_size: tokens per block.
        is_keyed: whether blocks get keys, so that they can be found again.
    """

    def __init__(self, block_size: int, *, is_keyed: bool):
        self._block_size = block_size
        self._is_keyed = is_keyed
        self._live: dict[RequestId, RequestState] = {}
        self._sequences: dict[SeqId, Sequence] = {}
        self._num_arrivals = 0
        self._num_sequences = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RequestState]:
        """All requests, in order of arrival; the table may change meanwhile."""
        return iter(list(self._live.values()))

    def check_new(self, request_id: RequestId) -> None:
        """Raises DuplicateRequest if the id is in use."""
        if request_id in self._live:
            raise DuplicateRequest(f"request_id: {request_id!r} is in use", metadata={"requestId": request_id})

    def add(self, request: Request) -> RequestState:
        """Takes in a request whose id is new, with those of its n samples that have not ended."""
        keys = request.keys_of_prompt(self._block_size) if self._is_keyed else []
        state = RequestState(request, [], keys)
        self._live[request.request_id] = state
        self._num_arrivals += 1
        for index, generated in enumerate(request.generated or ((),) * request.n):
            if generated is None:
                continue
            self._num_sequences += 1
            token_ids = [*request.prompt_token_ids, *generated]
            sequence = Sequence(
                seq_id=SeqId(self._num_sequences),
                request=request,
                index=index,
                order=(self._num_arrivals, index),
                token_ids=token_ids,
                keys=chain_keys(request.root_key, token_ids, self._block_size) if generated and self._is_keyed else list(keys),
                is_keyed=self._is_keyed,
                table=BlockTable(self._block_size),
                max_known_tokens=len(request.prompt_token_ids) + request.stop.max_tokens,
            )
            state.sequences.append(sequence)
            self._sequences[sequence.seq_id] = sequence
        return state

    def get(self, request_id: RequestId) -> RequestState | None:
        """A request; None: unknown or ended."""
        return self._live.get(request_id)

    def state_of(self, sequence: Sequence) -> RequestState:
        """The request of a sequence in the table."""
        return self._live[sequence.request.request_id]

    def sequence(self, seq_id: SeqId) -> Sequence | None:
        """A sequence; None: unknown or ended."""
        return self._sequences.get(seq_id)

    def sequences(self) -> list[Sequence]:
        """All sequences, in order of arrival."""
        return list(self._sequences.values())

    def remove(self, sequence: Sequence) -> RequestState:
        """Takes out a sequence that ends; with its last one the request ends, too."""
        state = self.state_of(sequence)
        state.sequences.remove(sequence)
        del self._sequences[sequence.seq_id]
        if not state.sequences:
            del self._live[state.request.request_id]
        return state
