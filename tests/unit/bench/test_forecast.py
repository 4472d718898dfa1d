import json
from pathlib import Path

import pytest

from bench.forecast import back_test
from bench.forecast_rivals import rivals
from bench.traces import TracedRequest, read_trace
from scheduler_svc.core.forecast.quantity import Quantity


def test_reads_both_formats(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    mooncake = tmp_path / "mooncake.jsonl"
    rows = [{"timestamp": 3000, "input_length": 7, "output_length": 2, "hash_ids": [0]}] * 2
    mooncake.write_text("\n".join(json.dumps(row) for row in rows))
    requests = read_trace(azure)
    assert requests[1].arrival_s == pytest.approx(4.314579)
    assert requests[1] == TracedRequest(requests[1].arrival_s, 396, 109)
    assert read_trace(mooncake) == [TracedRequest(0.0, 7, 2)] * 2


def test_rivals_know_the_past_alone() -> None:
    forecasts = {rival.name: rival.forecasts for rival in rivals([1, 2, 3, 4], 2)}
    assert forecasts["last"] == [1, 3, 5, 7]
    assert forecasts["mean"] == [2, 3, 4, 5]
    assert forecasts["smoothing 10 s"][0] == pytest.approx(2)


def test_a_steady_trace_is_forecast_exactly_by_all() -> None:
    requests = [TracedRequest(second + 0.5, 100, 10) for second in range(700)]
    row = back_test(requests, Quantity.PROMPT_TOKENS, 10, 300)
    assert max(row.last, row.mean, row.chosen, row.hindsight, row.median, row.error) < 1e-3
    assert row.floor > 0.2


def test_a_half_life_is_chosen_in_the_warm_up_alone() -> None:
    early = [TracedRequest(second + 0.5, 100, 10) for second in range(0, 600, 20)]  # regular: the longer, the better
    late = [
        TracedRequest(600 + second + 0.5, 100, 10) for second in range(1200) if second // 100 % 2
    ]  # on and off for 100 s each
    row = back_test([*early, *late], Quantity.REQUESTS, 10, 600)

    assert int(row.chosen_half_life.removesuffix(" s")) > int(row.half_life.removesuffix(" s"))
    assert row.chosen > row.hindsight
    assert row.best_chosen >= row.best_in_hindsight
