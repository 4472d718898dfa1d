"""Outcomes as rows of figures, for a terminal or a page. Knows no format of either."""

from collections.abc import Sequence

from scheduler_svc.simulation.outcome import Outcome, Served, percentile, tpots, ttfts

Rows = list[tuple[str, ...]]
"""The first one names the columns."""
_PERCENTS = (50, 90, 99)
_NOTHING = "-"
_LATENCIES = (
    *(f"TTFT p{_PERCENTS[0]} ms", *(f"p{percent}" for percent in _PERCENTS[1:])),
    *(f"TPOT p{_PERCENTS[0]} ms", *(f"p{percent}" for percent in _PERCENTS[1:])),
)


def rows_of(outcomes: Sequence[Outcome]) -> Rows:
    """One for each outcome."""
    head = ("policy", "requests", "failed", *_LATENCIES, "output tokens/s", "preemptions", "end s")
    return [head, *(_row(outcome) for outcome in outcomes)]


def group_rows(outcomes: Sequence[Outcome]) -> Rows:
    """One for each outcome, tenant and class."""
    rows: Rows = [("policy", "tenant", "class", "requests", "failed", *_LATENCIES, "share of tokens")]
    for outcome in outcomes:
        groups: dict[tuple[str, int, str], list[Served]] = {}
        for one in outcome.served:
            arrival = one.arrival
            key = (arrival.tenant, arrival.service_class.value, arrival.service_class.name.lower())
            groups.setdefault(key, []).append(one)
        total = sum(map(_num_tokens, outcome.served))
        for (tenant, _, service_class), served in sorted(groups.items()):
            share = f"{100 * sum(map(_num_tokens, served)) / max(1, total):.0f} %"
            rows.append((outcome.policy, tenant or "all", service_class, *_counts(served), *_latencies(served), share))
    return rows


def failures_of(outcome: Outcome) -> dict[str, int]:
    """How many requests failed, by reason."""
    reasons: dict[str, int] = {}
    for one in outcome.served:
        if one.error:
            reasons[one.error] = reasons.get(one.error, 0) + 1
    return reasons


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.policy,
        *_counts(outcome.served),
        *_latencies(outcome.served),
        f"{outcome.num_output_tokens / max(outcome.end_s, 1e-9):.0f}",
        str(outcome.num_preemptions),
        f"{outcome.end_s:.1f}",
    )


def _counts(served: Sequence[Served]) -> tuple[str, str]:
    return str(len(served)), str(sum(bool(one.error) for one in served))


def _latencies(served: Sequence[Served]) -> tuple[str, ...]:
    first, per = ttfts(served), tpots(served)
    return (*(_ms(first, percent, 0) for percent in _PERCENTS), *(_ms(per, percent, 1) for percent in _PERCENTS))


def _ms(seconds: Sequence[float], percent: int, num_digits: int) -> str:
    return f"{1e3 * percentile(seconds, percent):.{num_digits}f}" if seconds else _NOTHING


def _num_tokens(one: Served) -> int:
    """Prompt and output tokens that were served."""
    return one.num_tokens + (one.arrival.num_prompt_tokens if one.num_tokens else 0)
