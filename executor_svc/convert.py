"""Between octavo.executor.v1 messages and the plain data of core and transfers. No decisions."""

from collections.abc import Sequence

from common.errors import InvalidParameter
from common.ids import BlockId, BlockKey, SeqId
from common.patience import Patience
from common.token_ids import unpack_token_ids
from executor_svc.core.plan import Chunk, NewSequence, StepPlan
from executor_svc.core.sampling import PositionLogprobs, SamplingParams
from executor_svc.runner import StepOutcome
from executor_svc.transfer import Load, LoadDone, Save, SaveDone
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.types.v1 import types_pb2


def plan_from_pb(message: pb.StepPlan) -> StepPlan[SamplingParams]:
    """What the scheduler wants computed."""
    return StepPlan(
        step_id=message.step_id,
        dropped_seq_ids=[SeqId(i) for i in message.dropped_seq_ids],
        new_sequences=[
            NewSequence(
                seq_id=SeqId(new.seq_id),
                token_ids=_token_ids(new),
                num_prompt_tokens=new.num_prompt_tokens,
                num_computed_tokens=new.num_computed_tokens,
                block_ids=[BlockId(i) for i in new.block_ids],
                sampling=_sampling_from_pb(new.sampling),
            )
            for new in message.new_sequences
        ],
        block_copies=[(BlockId(c.source_block_id), BlockId(c.destination_block_id)) for c in message.block_copies],
        chunks=[_chunk_from_pb(chunk) for chunk in message.chunks],
    )


def _token_ids(message: pb.NewSequence) -> Sequence[int]:
    try:
        return unpack_token_ids(message.token_ids)
    except ValueError as error:
        raise InvalidParameter("plan.new_sequences.token_ids", f"sequence {message.seq_id}: {error}") from error


def _chunk_from_pb(message: pb.Chunk) -> Chunk:
    block_ids = message.new_block_ids
    return Chunk(SeqId(message.seq_id), message.num_tokens, [BlockId(i) for i in block_ids] if block_ids else ())


def outcome_to_pb(outcome: StepOutcome, *, idle_s: float) -> pb.StepResult:
    """What came out of a step."""
    result = pb.StepResult(
        step_id=outcome.step_id,
        errors=[pb.SequenceError(seq_id=failure.seq_id, message=failure.message) for failure in outcome.failures],
        timings=pb.StepTimings(
            prepare_s=outcome.prepare_s,
            forward_s=outcome.forward_s,
            sample_s=outcome.sample_s,
            idle_s=idle_s,
            num_tokens=outcome.num_tokens,
        ),
    )
    for sampled in outcome.sampled:
        logprobs = None if sampled.logprobs is None else _logprobs_to_pb(sampled.logprobs)
        result.sampled.add(seq_id=sampled.seq_id, token_id=sampled.token_id, logprobs=logprobs)
    return result


def load_from_pb(message: pb.LoadBlocks) -> Load:
    """What to bring up from the store."""
    patience = Patience(message.timeout_s, message.timeout_per_block_s)
    return Load(message.load_id, _blocks_from_pb(message.keys, message.block_ids), patience)


def save_from_pb(message: pb.SaveBlocks) -> Save:
    """What to bring down to the store."""
    return Save(message.save_id, _blocks_from_pb(message.keys, message.block_ids))


def transfer_to_pb(done: LoadDone | SaveDone) -> pb.RunSessionResponse:
    """What became of a load or save."""
    if isinstance(done, SaveDone):
        saved = pb.BlocksSaved(
            save_id=done.save_id,
            num_written=done.num_written,
            num_present=done.num_present,
            num_failed=done.num_failed,
            reason=done.reason,
        )
        return pb.RunSessionResponse(blocks_saved=saved)
    loaded = pb.BlocksLoaded(
        load_id=done.load_id,
        num_loaded=done.num_loaded,
        num_by_tier=done.num_by_tier,
        reason=done.reason,
        seconds=done.seconds,
        tiers=[
            pb.TierLoading(tier=reading.tier, num_blocks=reading.num_blocks, first_s=reading.first_s, seconds=reading.seconds)
            for reading in done.readings
        ],
    )
    return pb.RunSessionResponse(blocks_loaded=loaded)


def _sampling_from_pb(message: pb.SequenceSampling) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        suppressed_until_min_tokens=frozenset(message.suppressed_until_min_tokens),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def _logprobs_to_pb(logprobs: PositionLogprobs) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=logprobs.chosen.token_id, logprob=logprobs.chosen.logprob),
        top=[types_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob) for token in logprobs.top],
    )


def _blocks_from_pb(keys: Sequence[bytes], block_ids: Sequence[int]) -> list[tuple[BlockKey, BlockId]]:
    return list(zip(map(BlockKey, keys), map(BlockId, block_ids), strict=True))
