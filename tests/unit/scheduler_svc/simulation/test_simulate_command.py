"""octavo simulate as its user sees it: figures of policies side by side, and what is wrong with what he gave."""

from pathlib import Path

import pytest

from common.degraded import DegradedPaths
from scheduler_svc.core_maker import RecordedCores
from scheduler_svc.recording.recorder import Recorder
from scheduler_svc.simulate_command import main
from scheduler_svc.simulation.arrivals import read_arrivals
from scheduler_svc.simulation.profile import DeviceProfile
from scheduler_svc.simulation.run import Simulation

SLOW = DeviceProfile("slow", (0.02, 0.005, 0, 0.2, 0, 0.1, 0.1), round_trip_s=0.001, num_blocks=4096, max_num_seqs=8)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{i:02}.6805900,{100 + 37 * i % 900},{5 + i % 20}" for i in range(40)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


@pytest.fixture
def recording(trace: Path, tmp_path: Path) -> Path:
    """Of a simulated run with policy fcfs."""
    recorder = Recorder(tmp_path / "rec", DegradedPaths())
    cores = RecordedCores(recorder.recording("local"))
    Simulation(read_arrivals(trace), SLOW, policy="fcfs", cores=cores).run()
    recorder.close()
    return next((tmp_path / "rec").glob("*.0000.octrec"))


def test_policies_are_shown_side_by_side(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--trace {trace} --policy fair --policy fcfs --policy fair --tenants a,b --html {tmp_path / 'r.html'}"

    assert main(words.split()) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines[1:3]] == [["fair", "40"], ["fcfs", "40"]]
    assert [line[:2] for line in lines[4:8]] == [["fair", "a"], ["fair", "b"], ["fcfs", "a"], ["fcfs", "b"]]
    assert (tmp_path / "r.html").exists()


def test_a_recording_is_simulated_by_its_own_policy_and_compared(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(recording), "--runs", "2"]) == 0

    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["policy", "fcfs", "fcfs:", "TTFT:", "TPOT:"]
    assert said.count("of a request: median error 0.") == 2
    assert said.count("two simulated runs differ by") == 2


def test_a_profile_is_learned_from_one_recording_for_another_trace(
    recording: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "p.json"
    words = f"--trace {trace} --device {recording} --save-profile {profile}"

    assert main(words.split()) == 0
    assert DeviceProfile.read(profile).coefficients[0] == pytest.approx(0.02, rel=0.2)
    assert "recorded" not in capsys.readouterr().out


def test_what_comes_otherwise_is_not_compared(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(recording), "--requests", "5"]) == 0

    captured = capsys.readouterr()
    assert "TTFT: recorded" not in captured.out
    assert "not compared" in captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--first 40", "the trace has requests from 0 to 39"),
        ("--num-blocks 1", "no request from --first 0 on fits the 16 tokens"),
        ("--num-blocks 20", "are longer than the 320 tokens"),
        ("--device nowhere", "neither one of h200-llama-8b, cpu-smollm2-135m nor a file"),
        ("--classes interactive,urgent", "'URGENT' is none of interactive, standard, batch"),
        ("--html /nowhere/r.html", "there is no folder /nowhere"),
    ],
)
def test_what_is_wrong_is_said(trace: Path, words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--trace", str(trace), *words.split()])

    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--executors 0", "--rate 0", "--rate nan", "--requests -1", "--runs 0", "--policy none"])
def test_numbers_out_of_range_are_refused(trace: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--trace", str(trace), *words.split()])
    assert words.split()[0] in capsys.readouterr().err
