"""The production scheduler in virtual time: always alike, as long as steps take, and as a recording of it says."""

import itertools
import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from common.errors import StartupError
from scheduler_svc.core.policies.choice import POLICIES
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.simulation.arrivals import Arrival, assign, at_rate, part_of, read_arrivals
from scheduler_svc.simulation.outcome import percentile, ttfts
from scheduler_svc.simulation.profile import PROFILES, DeviceProfile
from scheduler_svc.simulation.report import Report
from scheduler_svc.simulation.run import Simulation
from scheduler_svc.simulation.tables import failures_of, rows_of

AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
FLAT = DeviceProfile("flat", (0.01, 0, 0, 0, 0, 0, 0), round_trip_s=0.0, host_step_s=0.0, host_token_s=0.0, num_blocks=4096)


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:{15 + i // 60}:{i % 60:02}.6805900,{100 + 37 * i % 900},{5 + i % 20}" for i in range(80)]
    path.write_text("\n".join([AZURE_HEAD, *rows]))
    return path


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 1100, "output_length": 4, "hash_ids": [0, 1, 2 + i]} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_request_alone_takes_as_long_as_its_steps(azure: Path) -> None:
    outcome = Simulation(part_of(read_arrivals(azure), 0, 1, 4096), FLAT).run()

    assert outcome.served[0].ttft_s == pytest.approx(0.01)
    assert outcome.served[0].tpot_s == pytest.approx(0.01)
    assert outcome.num_steps == 5


def test_steps_hesitate_and_lie_apart_as_those_that_were_measured(azure: Path) -> None:
    halting = replace(FLAT, hitches_s=(0.002,), between_steps_s=0.003)
    outcome = Simulation(part_of(read_arrivals(azure), 0, 1, 4096), halting).run()

    assert outcome.served[0].ttft_s == pytest.approx(0.012)
    assert outcome.served[0].tpot_s == pytest.approx(0.015)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_everybody_is_served_and_always_alike(azure: Path, policy: str) -> None:
    arrivals = list(assign(at_rate(read_arrivals(azure), 30.0), ["big", "big", "small"], list(ServiceClass)))
    one, again = (Simulation(arrivals, PROFILES["h200-llama-8b"], 2, policy, seed=3).run() for _ in range(2))

    assert [served.num_tokens for served in one.served] == [arrival.num_output_tokens for arrival in arrivals]
    assert one.served == again.served
    assert one.end_s < 10


def _prompt(first: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(range(first, first + num_tokens))


def test_a_tenant_that_others_share_with_waits_hardly_longer_while_there_is_room_for_all() -> None:
    """Short steps for the sake of the small tenant would cost a fourth of the device: as much as is free here."""
    rng = random.Random(4)
    times = itertools.accumulate(rng.expovariate(18.0) for _ in range(400))
    sizes = ((min(8000, int(rng.lognormvariate(6.6, 0.9))), rng.randrange(20, 400)) for _ in itertools.count())
    arrivals = [Arrival(at_s, n, m, partial(_prompt, i, n)) for i, (at_s, (n, m)) in enumerate(zip(times, sizes, strict=False))]
    of_big = {}
    for policy in ("fair", "fcfs"):
        loads = assign(arrivals, ["big", "big", "big", "small"], [ServiceClass.STANDARD])
        served = Simulation(list(loads), PROFILES["h200-llama-8b"], policy=policy).run().served
        of_big[policy] = ttfts([one for one in served if one.arrival.tenant == "big"])
    for percent in (50, 90):
        assert percentile(of_big["fair"], percent) < 1.5 * percentile(of_big["fcfs"], percent)


def test_prefixes_of_a_trace_are_shared(mooncake: Path) -> None:
    arrivals = read_arrivals(mooncake)
    prompts = [arrival.prompt() for arrival in arrivals]

    assert all(len(prompt) == 1100 for prompt in prompts)
    assert len({prompt[:1024] for prompt in prompts}) == 1
    assert len(set(prompts)) == 10


def test_more_load_waits_longer(azure: Path) -> None:
    slow = DeviceProfile("slow", (0.02, 0, 0, 0.1, 0, 0, 0), max_num_seqs=4, num_blocks=4096)
    waits = [percentile(ttfts(Simulation(at_rate(read_arrivals(azure), rate), slow).run().served), 50) for rate in (1.0, 20.0)]

    assert waits[1] > 3 * waits[0]


def test_the_report_is_one_file_that_needs_nothing_else(azure: Path, tmp_path: Path) -> None:
    arrivals = list(assign(at_rate(read_arrivals(azure), 20.0), ["a & b", "<c>"], [ServiceClass.STANDARD]))
    outcomes = [Simulation(arrivals, FLAT, policy=policy).run() for policy in ("fair", "fcfs")]
    Report("x < y", "p & q", outcomes, recorded=outcomes[0].served).write(tmp_path / "r.html")

    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 11
    assert "x &lt; y" in page and "&lt;c&gt;" in page and "a &amp; b" in page and "p &amp; q" in page
    assert page.count(">recorded<") > 1
    assert "http" not in page and "<script" not in page


def test_a_report_of_requests_that_all_failed_has_no_figures(azure: Path, tmp_path: Path) -> None:
    outcome = Simulation(read_arrivals(azure), replace(FLAT, num_blocks=2)).run()
    Report("nobody", "", [outcome]).write(tmp_path / "r.html")

    assert failures_of(outcome) == {"KV_POOL_TOO_SMALL": 80}
    assert rows_of([outcome])[1][:9] == ("fair", "80", "80", "-", "-", "-", "-", "-", "-")
    assert "nothing to show" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("trace.csv", "", "TIMESTAMP"),
        ("trace.csv", "TIMESTAMP,ContextTokens\n", "GeneratedTokens is missing"),
        ("trace.csv", f"{AZURE_HEAD}\n", "empty"),
        ("trace.csv", f"{AZURE_HEAD}\n2023-11-16 18:15:46.68,10,5\n2023-11-16 18:15:46.70,ten,5\n", "line 3: .*'ten'"),
        ("trace.csv", f"{AZURE_HEAD}\nyesterday,10,5\n", "line 2: .*yesterday"),
        ("trace.csv", f"{AZURE_HEAD}\n2023-11-16 18:15:46.68,10\n", "line 2"),
        ("trace.csv", f"{AZURE_HEAD}\n2023-11-16 18:15:46.68,-1,5\n", "line 2: .*ContextTokens is -1"),
        ("trace.jsonl", "", "empty"),
        ("trace.jsonl", "{}\n", "line 1: .*input_length"),
        ("trace.jsonl", '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]}\n{"time', "line 2"),
        ("trace.jsonl", "[]\n", "line 1"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(StartupError, match=said):
        read_arrivals(tmp_path / name)


def test_arrivals_are_put_in_order_and_begin_at_0(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:48.00,10,5", "2023-11-16 18:15:46.00,20,5"]
    (tmp_path / "trace.csv").write_text("\n".join([AZURE_HEAD, *rows]))

    assert [(one.at_s, one.num_prompt_tokens) for one in read_arrivals(tmp_path / "trace.csv")] == [(0.0, 20), (2.0, 10)]


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(PROFILES["h200-llama-8b"].to_json())
    (tmp_path / "bad.json").write_text("{}")

    assert DeviceProfile.read(tmp_path / "p.json") == PROFILES["h200-llama-8b"]
    with pytest.raises(StartupError):
        DeviceProfile.read(tmp_path / "bad.json")
