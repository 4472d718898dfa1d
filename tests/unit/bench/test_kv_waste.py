"""The memory benchmark on a trace made up here: its figures are those of the real pool."""

from pathlib import Path

from bench.kv_waste import TraceRequest, measure_kv_waste, read_trace

ROWS = ["374,44", "396,109", "879,55", "91,16", "1313,142", "7000,9", "388,0", "242,14", "209,152"]


def test_kv_waste_is_small_and_more_requests_fit(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16,{row}\n" for row in ROWS * 20))
    trace = read_trace(path, max_model_len=4096, num_requests=100)

    waste = measure_kv_waste(trace, num_blocks=1024, block_size=16, max_model_len=4096)

    assert waste.num_requests == 100
    assert 0 < waste.waste_ratio < 0.04
    assert waste.num_contiguous == 4
    assert waste.gain > 3
    assert waste.used_ratio > 0.9


def test_requests_that_do_not_fit_the_context_or_yield_nothing_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,10,5\nx,10,6\nx,10,0\nx,9,6\n")

    assert read_trace(path, max_model_len=15, num_requests=9) == [TraceRequest(10, 5), TraceRequest(9, 6)]
