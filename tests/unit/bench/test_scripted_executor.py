"""The executor that computes nothing draws a token whenever a sequence is at its end, and never otherwise."""

from bench.scripted_executor import Sequences
from common.token_ids import pack_token_ids
from octavo.executor.v1 import executor_service_pb2 as pb


def test_a_token_comes_with_the_last_chunk_of_the_prompt_and_with_every_decode() -> None:
    sequences = Sequences()
    new = pb.NewSequence(seq_id=1, token_ids=pack_token_ids([1, 2, 3, 4, 5]), num_computed_tokens=1)
    plans = [
        pb.StepPlan(step_id=1, new_sequences=[new], chunks=[pb.Chunk(seq_id=1, num_tokens=3)]),
        pb.StepPlan(step_id=2, chunks=[pb.Chunk(seq_id=1, num_tokens=1)]),
        pb.StepPlan(step_id=3, chunks=[pb.Chunk(seq_id=1, num_tokens=1)]),
        pb.StepPlan(step_id=4, dropped_seq_ids=[1], chunks=[]),
    ]

    results = [sequences.execute(plan) for plan in plans]

    assert [result.step_id for result in results] == [1, 2, 3, 4]
    assert [[sampled.seq_id for sampled in result.sampled] for result in results] == [[], [1], [1], []]


def test_a_preempted_sequence_comes_back_under_its_id() -> None:
    sequences = Sequences()
    for token_ids in ([1, 2], [1, 2, 3]):
        new = pb.NewSequence(seq_id=7, token_ids=pack_token_ids(token_ids))
        chunk = pb.Chunk(seq_id=7, num_tokens=len(token_ids))
        result = sequences.execute(pb.StepPlan(step_id=1, dropped_seq_ids=[7], new_sequences=[new], chunks=[chunk]))
        assert len(result.sampled) == 1
