from common.ids import BlockId, BlockKey, SeqId
from common.patience import Patience
from common.token_ids import pack_token_ids
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc import convert
from scheduler_svc.core import plan as core
from scheduler_svc.core.request import SamplingParams, StopConditions


def test_a_plan_keeps_everything() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_p=0.5, top_k=5, min_p=0.25, presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.5,
        seed=2**64 - 1, logit_bias={3: -100.0}, num_logprobs=0,
    )  # fmt: skip
    stop = StopConditions(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({7, 2}))
    plan = core.StepPlan(
        step_id=12,
        dropped_seq_ids=(SeqId(1),),
        new_sequences=(core.NewSequence(SeqId(2), (5, 6, 7), 2, 1, (BlockId(0), BlockId(8)), sampling, stop),),
        block_copies=(core.BlockCopy(BlockId(3), BlockId(4)),),
        chunks=(core.Chunk(SeqId(2), 2, (BlockId(9),)), core.Chunk(SeqId(3), 1)),
    )
    expected = pb.StepPlan(
        step_id=2,
        dropped_seq_ids=[1],
        new_sequences=[
            pb.NewSequence(
                seq_id=2, token_ids=pack_token_ids([5, 6, 7]), num_prompt_tokens=2, num_computed_tokens=1, block_ids=[0, 8],
                sampling=pb.SequenceSampling(
                    temperature=0.5, top_p=0.5, top_k=5, min_p=0.25, presence_penalty=1.0, frequency_penalty=-1.0,
                    repetition_penalty=1.5, seed=2**64 - 1, logit_bias={3: -100.0}, min_tokens=2,
                    suppressed_until_min_tokens=[2, 7], num_logprobs=0,
                ),
            )
        ],
        block_copies=[pb.BlockCopy(source_block_id=3, destination_block_id=4)],
        chunks=[pb.Chunk(seq_id=2, num_tokens=2, new_block_ids=[9]), pb.Chunk(seq_id=3, num_tokens=1)],
    )  # fmt: skip
    assert convert.plan_command(plan, 2).plan == expected


def test_stop_ids_are_sent_only_when_they_have_to_be_suppressed() -> None:
    new = core.NewSequence(SeqId(2), (5,), 1, 0, (), SamplingParams(), StopConditions(9, 0, frozenset({7})))
    sampling = convert.plan_command(core.StepPlan(1, new_sequences=(new,)), 1).plan.new_sequences[0].sampling
    assert not sampling.suppressed_until_min_tokens and not sampling.HasField("num_logprobs")


def test_transfers_keep_the_order_of_their_blocks() -> None:
    keys = tuple(BlockKey(bytes([i]) * 32) for i in range(3))
    block_ids = tuple(BlockId(9 - i) for i in range(3))
    load = convert.load_command(core.LoadPlan(5, keys, block_ids), Patience(0.5, 0.25)).load_blocks
    save = convert.save_command(core.SavePlan(6, keys, block_ids)).save_blocks
    assert (load.load_id, load.timeout_s, save.save_id) == (5, 0.5, 6)
    assert tuple(load.keys) == tuple(save.keys) == keys
    assert tuple(load.block_ids) == tuple(save.block_ids) == block_ids


def test_a_result_gives_tokens_and_errors() -> None:
    result = pb.StepResult(sampled=[pb.SampledToken(seq_id=1, token_id=5)], errors=[pb.SequenceError(seq_id=2, message="bad")])
    assert convert.sampled_tokens(result) == {1: 5}
    assert convert.sequence_errors(result) == {SeqId(2): "bad"}
