"""Plans of the core to messages of octavo.executor.v1, and results back. Knows both shapes; decides nothing."""

from functools import lru_cache
from typing import cast

from common.ids import SeqId
from common.patience import Patience
from common.token_ids import pack_token_ids
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.types.v1.types_pb2 import PositionLogprobs
from scheduler_svc.core import plan as core
from scheduler_svc.core.request import SamplingParams, StopConditions

_MANY_CHUNKS = 8192
"""More than the sequences of all executors in a step."""


def plan_command(plan: core.StepPlan, step_id: int) -> pb.RunSessionRequest:
    """A step for the executor, under the step_id of the session."""
    command = pb.RunSessionRequest(
        plan=pb.StepPlan(
            step_id=step_id,
            dropped_seq_ids=plan.dropped_seq_ids,
            new_sequences=[_new_sequence(sequence) for sequence in plan.new_sequences],
            block_copies=[
                pb.BlockCopy(source_block_id=copy.source, destination_block_id=copy.destination) for copy in plan.block_copies
            ],
        )
    )
    command.plan.MergeFromString(b"".join(map(_encoded_chunk, plan.chunks)))
    return command


@lru_cache(_MANY_CHUNKS)
def _encoded_chunk(chunk: core.Chunk) -> bytes:
    """A plan of a chunk alone: such plans one after the other are one with all. Most are the same as in the last step."""
    message = pb.Chunk(seq_id=chunk.seq_id, num_tokens=chunk.num_tokens, new_block_ids=chunk.new_block_ids)
    data: bytes = pb.StepPlan(chunks=[message]).SerializeToString()
    return data


def load_command(plan: core.LoadPlan, patience: Patience) -> pb.RunSessionRequest:
    """A load of blocks from the store."""
    load = pb.LoadBlocks(load_id=plan.load_id, keys=plan.keys, block_ids=plan.block_ids)
    load.timeout_s, load.timeout_per_block_s = patience.first_s, patience.per_block_s
    return pb.RunSessionRequest(load_blocks=load)


def save_command(plan: core.SavePlan) -> pb.RunSessionRequest:
    """A save of blocks to the store."""
    return pb.RunSessionRequest(save_blocks=pb.SaveBlocks(save_id=plan.save_id, keys=plan.keys, block_ids=plan.block_ids))


def sampled_tokens(result: pb.StepResult) -> dict[SeqId, int]:
    """The tokens of a result, as the core takes them; log probabilities go their own way to the edge."""
    return {cast(SeqId, sampled.seq_id): sampled.token_id for sampled in result.sampled}


def token_logprobs(result: pb.StepResult) -> dict[SeqId, list[PositionLogprobs]]:
    """Log probabilities of the tokens of a result, where there are some."""
    return {SeqId(sampled.seq_id): [sampled.logprobs] for sampled in result.sampled if sampled.HasField("logprobs")}


def sequence_errors(result: pb.StepResult) -> dict[SeqId, str]:
    """The sequences of a result that failed alone."""
    return {SeqId(error.seq_id): error.message for error in result.errors}


def _new_sequence(sequence: core.NewSequence) -> pb.NewSequence:
    return pb.NewSequence(
        seq_id=sequence.seq_id,
        token_ids=pack_token_ids(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=sequence.block_ids,
        sampling=_sampling(sequence.sampling, sequence.stop),
    )


def _sampling(sampling: SamplingParams, stop: StopConditions) -> pb.SequenceSampling:
    return pb.SequenceSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        logit_bias=sampling.logit_bias,
        min_tokens=stop.min_tokens,
        suppressed_until_min_tokens=sorted(stop.stop_token_ids) if stop.min_tokens else (),
        num_logprobs=sampling.num_logprobs,
    )
