"""Messages to plain data and back: nothing is lost, and what is not set stays not set."""

from array import array

import pytest

from common.errors import InvalidParameter
from common.patience import Patience
from common.token_ids import pack_token_ids
from executor_svc import convert
from executor_svc.clients.kvstore_report import TierReading
from executor_svc.core.plan import Chunk, NewSequence, SequenceFailure, StepPlan
from executor_svc.core.sampling import PositionLogprobs, SamplingParams, TokenLogprob
from executor_svc.runner import Sampled, StepOutcome
from executor_svc.transfer import Load, LoadDone, Save, SaveDone
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.types.v1 import types_pb2


def test_a_plan_arrives_whole() -> None:
    sampling = pb.SequenceSampling(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, presence_penalty=1, frequency_penalty=-1, repetition_penalty=2,
        seed=2**64 - 1, logit_bias={3: -4.0}, min_tokens=2, suppressed_until_min_tokens=[9, 8], num_logprobs=0,
    )  # fmt: skip
    message = pb.StepPlan(
        step_id=3,
        dropped_seq_ids=[1, 2],
        new_sequences=[
            pb.NewSequence(
                seq_id=4,
                token_ids=pack_token_ids([5, 6]),
                num_prompt_tokens=1,
                num_computed_tokens=1,
                block_ids=[7],
                sampling=sampling,
            )
        ],
        block_copies=[pb.BlockCopy(source_block_id=1, destination_block_id=2)],
        chunks=[pb.Chunk(seq_id=4, num_tokens=1, new_block_ids=[8, 9])],
    )

    plan = convert.plan_from_pb(message)

    params = SamplingParams(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, presence_penalty=1, frequency_penalty=-1, repetition_penalty=2,
        seed=2**64 - 1, logit_bias={3: -4.0}, min_tokens=2, suppressed_until_min_tokens=frozenset({8, 9}), num_logprobs=0,
    )  # fmt: skip
    new = NewSequence(4, array("I", [5, 6]), 1, 1, [7], params)  # type: ignore[arg-type, list-item]
    assert plan == StepPlan(3, [1, 2], [new], [(1, 2)], [Chunk(4, 1, [8, 9])])  # type: ignore[arg-type, list-item]


def test_half_a_token_id_is_an_invalid_plan() -> None:
    message = pb.StepPlan(step_id=1, new_sequences=[pb.NewSequence(seq_id=4, token_ids=bytes(7))])

    with pytest.raises(InvalidParameter, match="sequence 4: 7 bytes"):
        convert.plan_from_pb(message)


def test_log_probabilities_that_are_not_asked_for_are_none() -> None:
    message = pb.StepPlan(step_id=1, new_sequences=[pb.NewSequence(seq_id=1, sampling=pb.SequenceSampling())])

    assert convert.plan_from_pb(message).new_sequences[0].sampling.num_logprobs is None


def test_an_outcome_leaves_whole() -> None:
    logprobs = PositionLogprobs(TokenLogprob(7, -0.5), (TokenLogprob(7, -0.5), TokenLogprob(8, -1.5)))
    outcome = StepOutcome(
        step_id=5,
        sampled=[Sampled(1, 7, logprobs), Sampled(2, 9, None)],  # type: ignore[arg-type]
        failures=[SequenceFailure(3, "why")],  # type: ignore[arg-type]
        num_tokens=11,
        prepare_s=0.25,
        forward_s=0.5,
        sample_s=0.125,
    )

    result = convert.outcome_to_pb(outcome, idle_s=0.75)

    chosen, other = types_pb2.TokenLogprob(token_id=7, logprob=-0.5), types_pb2.TokenLogprob(token_id=8, logprob=-1.5)
    assert result == pb.StepResult(
        step_id=5,
        sampled=[
            pb.SampledToken(seq_id=1, token_id=7, logprobs=types_pb2.PositionLogprobs(chosen=chosen, top=[chosen, other])),
            pb.SampledToken(seq_id=2, token_id=9),
        ],
        errors=[pb.SequenceError(seq_id=3, message="why")],
        timings=pb.StepTimings(prepare_s=0.25, forward_s=0.5, sample_s=0.125, idle_s=0.75, num_tokens=11),
    )
    assert not result.sampled[1].HasField("logprobs")


def test_transfers_arrive_and_leave_whole() -> None:
    keys, block_ids = [b"a" * 32, b"b" * 32], [3, 1]
    expected = [(b"a" * 32, 3), (b"b" * 32, 1)]

    load = pb.LoadBlocks(load_id=1, keys=keys, block_ids=block_ids, timeout_s=0.5, timeout_per_block_s=0.25)
    assert convert.load_from_pb(load) == Load(1, expected, Patience(0.5, 0.25))  # type: ignore[arg-type]
    assert convert.save_from_pb(pb.SaveBlocks(save_id=2, keys=keys, block_ids=block_ids)) == Save(2, expected)  # type: ignore[arg-type]
    readings = [TierReading("shm", 2, 0.1, 0.2)]
    tiers = [pb.TierLoading(tier="shm", num_blocks=2, first_s=0.1, seconds=0.2)]
    assert convert.transfer_to_pb(LoadDone(1, 2, {"shm": 2}, "why", 0.5, readings)) == pb.RunSessionResponse(
        blocks_loaded=pb.BlocksLoaded(load_id=1, num_loaded=2, num_by_tier={"shm": 2}, reason="why", seconds=0.5, tiers=tiers)
    )
    assert convert.transfer_to_pb(SaveDone(2, 1, 2, 3, "full")) == pb.RunSessionResponse(
        blocks_saved=pb.BlocksSaved(save_id=2, num_written=1, num_present=2, num_failed=3, reason="full")
    )
