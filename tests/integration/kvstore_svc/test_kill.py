"""kill -9 at random moments, and flipped bits: the short form of make bench-kv-kill."""

from pathlib import Path

from bench.kv_kill import run


def test_what_was_durable_survives_and_nothing_is_wrong_or_left_behind(tmp_path: Path) -> None:
    outcome = run(tmp_path, num_kills=10, seed=7)

    assert outcome.problems == []
    assert outcome.counts["kills"] == 10
    assert outcome.counts["durable blocks read"] > 0
    assert outcome.counts["bits flipped in segments"] > 0
    assert outcome.counts["blocks of Redis read"] > 0
    assert outcome.counts["bits flipped in Redis values"] > 0
