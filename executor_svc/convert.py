"""Between octavo.executor.v1 messages and the plain data of core and transfers. No decisions."""

from collections.abc import Mapping

from common.ids import BlockId, BlockKey, SeqId
from executor_svc.core.plan import Chunk, NewSequence, StepPlan
from executor_svc.runner import StepOutcome
from executor_svc.transfer import Load, LoadDone, Save, SaveDone
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.types.v1 import types_pb2


def plan_from_pb(message: pb.StepPlan) -> StepPlan[pb.SequenceSampling]:
    """The plan; sampling stays the message, the sampler reads it once per sequence."""
    return StepPlan(
        step_id=message.step_id,
        dropped_seq_ids=[SeqId(i) for i in message.dropped_seq_ids],
        new_sequences=[
            NewSequence(
                seq_id=SeqId(new.seq_id),
                token_ids=list(new.token_ids),
                num_prompt_tokens=new.num_prompt_tokens,
                num_computed_tokens=new.num_computed_tokens,
                block_ids=[BlockId(i) for i in new.block_ids],
                sampling=new.sampling,
            )
            for new in message.new_sequences
        ],
        block_copies=[(BlockId(c.source_block_id), BlockId(c.destination_block_id)) for c in message.block_copies],
        chunks=[Chunk(SeqId(c.seq_id), c.num_tokens, [BlockId(i) for i in c.new_block_ids]) for c in message.chunks],
    )
