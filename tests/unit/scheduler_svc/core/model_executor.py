"""An executor without a model: it carries out plans word for word, and its KV of a position is a digest of all tokens up to it.

So whatever a step reads can be checked: it must be the KV of that very prefix, written by an earlier step, a copy or a load.
The next token is a function of the prefix and the seed alone, so every batching, chunking and caching must give the same output.

A sequence that fails leaves tainted KV behind. Steps that are in flight then may read it; all they yield is tainted as well, and
the tokens they draw are wrong ones, which must never come out.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.ids import BlockId, BlockKey, SeqId
from scheduler_svc.core.plan import NewSequence, StepPlan
from scheduler_svc.core.request import FinishReason, Request, SamplingParams, StopConditions

VOCAB_SIZE = 50
GARBAGE = -1
TAINTED = -2
WRONG_TOKEN = 999


def root_digest(root_key: BlockKey) -> int:
    return int.from_bytes(root_key[:8])


def next_digest(digest: int, token_id: int) -> int:
    return hash((digest, token_id))


def next_token(digest: int, seed: int, num_outputs: int, stop: StopConditions) -> int:
    """The token that follows a prefix; stop ids are not drawn before min_tokens."""
    token_id = hash((digest, seed)) % VOCAB_SIZE
    while num_outputs < stop.min_tokens and token_id in stop.stop_token_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def expected_output(request: Request, index: int) -> tuple[list[int], FinishReason]:
    """What a sample must yield, whatever else runs."""
    digest = root_digest(request.root_key)
    for token_id in request.prompt_token_ids:
        digest = next_digest(digest, token_id)
    outputs: list[int] = []
    while len(outputs) < request.stop.max_tokens:
        token_id = next_token(digest, request.sampling.seed + index, len(outputs), request.stop)
        outputs.append(token_id)
        if token_id in request.stop.stop_token_ids:
            return outputs, FinishReason.STOP
        digest = next_digest(digest, token_id)
    return outputs, FinishReason.LENGTH


@dataclass
class _Sequence:
    token_ids: list[int]
    digests: list[int]  # of every prefix of token_ids
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[BlockId]
    sampling: SamplingParams
    stop: StopConditions
    is_tainted: bool = False

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.digests.append(next_digest(self.digests[-1], token_id))


@dataclass
class ModelExecutor:
    """See the module's first lines.

    Attributes:
        root_of: the root key of each sequence's chain: KV of different roots must never be mixed.
        failing: sequences whose next chunk fails.
        failed: sequences that failed; their chunks are skipped until the scheduler drops them.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    root_of: dict[SeqId, BlockKey] = field(default_factory=dict)
    failing: set[SeqId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.kv: list[list[int]] = [[GARBAGE] * self.block_size for _ in range(self.num_blocks)]
        self.sequences: dict[SeqId, _Sequence] = {}
        self.failed: set[SeqId] = set()
        self.last_step_id = 0
        self.num_computed_tokens = 0
        self.num_block_copies = 0

    def run(self, plan: StepPlan) -> tuple[dict[SeqId, int], dict[SeqId, str]]:
        """Carries out a step."""
        self.last_step_id += 1
        assert plan.step_id == self.last_step_id
        for seq_id in plan.dropped_seq_ids:
            if seq_id in self.failed:
                self.failed.remove(seq_id)
            else:
                del self.sequences[seq_id]
        for new in plan.new_sequences:
            self._start(new)
        self._copy_blocks(plan)
        assert len({chunk.seq_id for chunk in plan.chunks}) == len(plan.chunks)
        assert 0 < sum(chunk.num_tokens for chunk in plan.chunks) <= self.max_num_batched_tokens
        assert len(self.sequences) <= self.max_num_seqs
        errors: dict[SeqId, str] = {}
        live = []
        for chunk in plan.chunks:
            if chunk.seq_id in self.failed:
                continue
            sequence = self.sequences[chunk.seq_id]
            sequence.block_ids += chunk.new_block_ids
            self._check_kv(sequence)  # what this step reads was written before this step
            if chunk.seq_id in self.failing:
                errors[chunk.seq_id] = "told to fail"
                sequence.is_tainted = True
                self._write(sequence, chunk.num_tokens)
                continue
            live.append(chunk)
            self._write(sequence, chunk.num_tokens)
        sampled: dict[SeqId, int] = {}
        for chunk in live:
            sequence = self.sequences[chunk.seq_id]
            self._check_kv(sequence)  # and no other chunk of the step has overwritten it
            if sequence.num_computed_tokens == len(sequence.token_ids):
                num_outputs = len(sequence.token_ids) - sequence.num_prompt_tokens
                token_id = next_token(sequence.digests[-1], sequence.sampling.seed, num_outputs, sequence.stop)
                token_id = WRONG_TOKEN if sequence.is_tainted else token_id
                sequence.append(token_id)
                sampled[chunk.seq_id] = token_id
        for seq_id in errors:
            self.failing.discard(seq_id)
            self.failed.add(seq_id)
            del self.sequences[seq_id]
        return sampled, errors

    def read(self, block_id: BlockId) -> list[int]:
        return list(self.kv[block_id])

    def write(self, block_ids: Seq[BlockId], contents: Seq[list[int]]) -> None:
        """What a load does, or half of it: blocks without content become garbage."""
        for i, block_id in enumerate(block_ids):
            self.kv[block_id] = list(contents[i]) if i < len(contents) else [GARBAGE] * self.block_size

    def _start(self, new: NewSequence) -> None:
        assert new.seq_id not in self.sequences
        assert new.seq_id not in self.failed
        assert 0 <= new.num_computed_tokens < len(new.token_ids)
        assert len(new.block_ids) == -(-new.num_computed_tokens // self.block_size)
        digests = [root_digest(self.root_of[new.seq_id])]
        for token_id in new.token_ids:
            digests.append(next_digest(digests[-1], token_id))
        self.sequences[new.seq_id] = _Sequence(
            list(new.token_ids),
            digests[1:],
            new.num_prompt_tokens,
            new.num_computed_tokens,
            list(new.block_ids),
            new.sampling,
            new.stop,
        )

    def _copy_blocks(self, plan: StepPlan) -> None:
        sources = {copy.source for copy in plan.block_copies}
        destinations = [copy.destination for copy in plan.block_copies]
        assert not sources & set(destinations), "copies depend on their order"
        assert len(set(destinations)) == len(destinations)
        for copy in plan.block_copies:
            self.kv[copy.destination] = list(self.kv[copy.source])
            self.num_block_copies += 1

    def _write(self, sequence: _Sequence, num_tokens: int) -> None:
        start = sequence.num_computed_tokens
        assert start + num_tokens <= len(sequence.token_ids), "a token is planned that nobody knows"
        for position in range(start, start + num_tokens):
            block_id = sequence.block_ids[position // self.block_size]
            self.kv[block_id][position % self.block_size] = TAINTED if sequence.is_tainted else sequence.digests[position]
        sequence.num_computed_tokens += num_tokens
        self.num_computed_tokens += num_tokens

    def _check_kv(self, sequence: _Sequence) -> None:
        size, num_computed = self.block_size, sequence.num_computed_tokens
        for start in range(0, num_computed, size):
            end = min(start + size, num_computed)
            block_id = sequence.block_ids[start // size]
            kv = self.kv[block_id]
            sequence.is_tainted |= TAINTED in kv[: end - start]
            assert sequence.is_tainted or kv[: end - start] == sequence.digests[start:end], (
                f"block {block_id} does not hold tokens {start} to {end - 1}"
            )
