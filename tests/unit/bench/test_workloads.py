"""The GPU workloads are what their one definition says."""

import json
from pathlib import Path

import pytest

from bench import workloads


def lengths(workload: workloads.Workload) -> list[tuple[int, int]]:
    return [(len(item.prompt_token_ids), item.num_output_tokens) for item in workload.items]


def test_decode_has_one_length_and_other_tokens_for_another_seed() -> None:
    first, second = workloads.decode(8, 11), workloads.decode(8, 12)

    assert lengths(first) == [(1024, 129)] * 8
    assert len({item.prompt_token_ids for item in first.items + second.items}) == 16
    assert first == workloads.decode(8, 11)


def test_token_ids_are_in_10_to_30000() -> None:
    ids = {i for item in workloads.mixed(0).items for i in item.prompt_token_ids}

    assert min(ids) == 10 and max(ids) == 30_000


def test_mixed_covers_its_range() -> None:
    prompts, outputs = zip(*lengths(workloads.mixed(1)), strict=True)

    assert len(prompts) == 256
    assert 100 <= min(prompts) < 130 and 990 < max(prompts) <= 1024
    assert 100 <= min(outputs) < 130 and 990 < max(outputs) <= 1024


def test_prefix_shares_its_beginning_only() -> None:
    items = workloads.prefix().items

    assert len({item.prompt_token_ids[:8192] for item in items}) == 1
    assert len({item.prompt_token_ids[8192:] for item in items}) == 64
    assert {len(item.prompt_token_ids) for item in items} == {8320}


def test_azure_keeps_lengths_and_bursts_and_scales_to_the_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    times = ("10.0000000", "20.0000000", "20.5000000", "30.0000000", "60.0000000")
    rows = [f"2023-11-16 18:00:{time[:2]}.{time[3:]},{100 + i},{i}" for i, time in enumerate(times[:4])]
    rows.append("2023-11-16 18:01:00.0000000,104,4")
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")

    items = workloads.azure(trace, rate=2, first_row=1, seconds=2).items

    assert [len(item.prompt_token_ids) for item in items] == [101, 102, 103, 104]
    assert [item.num_output_tokens for item in items] == [1, 2, 3, 4]
    assert [item.arrival_s for item in items] == pytest.approx([0.0, 0.025, 0.5, 2.0])


def test_a_trace_that_is_too_short_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0000000,1,1\n")

    with pytest.raises(ValueError, match="has 1 rows from row 0 on, 2 are needed"):
        workloads.azure(trace, rate=1, first_row=0, seconds=2)


def test_turns_begin_long_and_grow() -> None:
    conversations = workloads.turns(3, 4, 2).conversations

    assert [[len(turn) for turn in c.new_token_ids] for c in conversations] == [[4096, 512, 512, 512]] * 3
    assert len({c.new_token_ids[0] for c in conversations}) == 3


def test_mooncake_requests_share_the_tokens_of_equal_hash_ids(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 600, 300, [0, 1]), (500, 40_000, 1, []), (2000, 1000, 7, [0, 2]), (3000, 10, 1, [3])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))

    first, second = workloads.mooncake(trace, 2, speed=4).items

    assert (len(first.prompt_token_ids), len(second.prompt_token_ids)) == (600, 1000)
    assert first.prompt_token_ids[:512] == second.prompt_token_ids[:512]
    assert first.prompt_token_ids[512:] != second.prompt_token_ids[512:600]
    assert (first.num_output_tokens, second.num_output_tokens) == (256, 7)
    assert (first.arrival_s, second.arrival_s) == (0.0, 0.5)
