"""The GPU benchmark on a tiny model and the CPU: real services, real clients, every workload."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import NO_GPU, has_gpu
from bench.gpu_measure import measure
from bench.gpu_options import smoke_options

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:4{i}.5000000,{8 + i},{3 + i}\n" for i in range(4)
)


def read(report: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    return {(row["workload"], row["figure"]): row for row in rows}


@pytest.mark.slow
def test_every_workload_is_measured_through_grpc_and_in_process(tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.csv", tmp_path / "report.jsonl"
    trace.write_text(TRACE)

    served = ("decode", "prefill", "mixed", "prefix", "azure")
    assert measure(replace(smoke_options(trace), served=served), with_attention=False, json_file=report)

    figures = read(report)
    expected = {
        ("start", "first"), ("decode 1", "step"), ("decode 4", "step"), ("prefill 1 x 48", "ttft"), ("prefill 4 x 32", "prompt"),
        ("mixed", "output"), ("prefix", "cold"), ("prefix", "again"), ("azure 8", "ttft p99"), ("azure 8", "tpot p50"),
    }  # fmt: skip
    assert expected <= figures.keys()
    assert all(figures[key]["octavo"] > 0 for key in expected if key[1] != "step")
    assert figures["mixed", "output"]["in process"] > 0
    assert figures["mixed", "output"]["split cost"] is not None


@pytest.mark.slow
def test_workloads_that_outgrow_the_device_are_measured_with_a_store_and_without(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    options = replace(smoke_options(), served=("turns", "reload"), in_process=(), starts=0)

    assert measure(options, with_attention=False, json_file=report)

    figures = read(report)
    for suffix in ("", " + store"):
        assert figures[f"turns 3:3:2{suffix}", "total"]["octavo"] > 0
        assert figures[f"reload 128{suffix}", "after eviction"]["octavo"] > 0


def test_without_a_gpu_one_sentence_says_so() -> None:
    if has_gpu():
        return
    done = subprocess.run([sys.executable, "-m", "bench.gpu"], capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert done.stderr.strip() == NO_GPU
