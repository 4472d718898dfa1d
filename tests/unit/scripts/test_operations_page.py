"""docs/operations.md names what the code has, where no table is generated."""

import re

from scheduler_svc.edge import validation
from scripts.reference_tables import PAGE, ROOT

SERVICES = ("common", "scheduler_svc", "executor_svc", "kvstore_svc")


def source_of(folder: str) -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / folder).rglob("*.py")))


def test_every_degraded_path_is_on_the_page_and_no_other() -> None:
    in_code = {name for folder in SERVICES for name in re.findall(r'\.note\(\s*"(\w+)"', source_of(folder))}
    section = PAGE.read_text().partition("## Degraded paths")[2].partition("\n## ")[0]

    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == in_code


def test_every_metric_is_on_the_page_and_no_other() -> None:
    sources = [(ROOT / "common" / "degraded.py"), *ROOT.glob("*_svc/metrics.py")]
    in_code = {name for source in sources for name in re.findall(r'"(octavo_\w+)"', source.read_text())}
    by_tier = re.findall(r'^    "(?:num_)?(\w+)": "', (ROOT / "kvstore_svc" / "metrics.py").read_text(), re.MULTILINE)
    in_code |= {f"octavo_kvstore_{name}" for name in by_tier}
    section = PAGE.read_text().partition("## Metrics")[2].partition("\n## ")[0]
    on_page = {name.removesuffix("_total") for name in re.findall(r"`(octavo_\w+)", section)}

    assert on_page == in_code


def test_the_limits_of_a_request_are_those_of_the_validation() -> None:
    section = PAGE.read_text().partition("## Limits of a request")[2].partition("\n## ")[0]
    for limit in (
        f"1..{validation.MAX_SAMPLES}",
        f"{validation.MAX_REQUEST_ID_CHARACTERS} characters",
        f"{validation.MAX_CACHE_SALT_BYTES} bytes",
        f"{validation.MAX_LOGIT_BIAS:,} entries",
        f"{validation.MAX_STOP_STRINGS} strings of at most {validation.MAX_STOP_BYTES} bytes",
        f"at most {validation.MAX_STOP_TOKEN_IDS} |",
        f"0..{validation.MAX_LOGPROBS}",
    ):
        assert limit in section
