"""The line about an answer."""

from octavo.answers import Timing, Usage
from octavo.cli.figures import answer_figures, prompt_sources


def test_tiers_come_fastest_first_and_what_is_left_was_computed() -> None:
    usage = Usage(100, 5, 80, {"disk": 16, "device": 48, "redis": 0, "shm": 16})

    assert prompt_sources(usage) == "48 device, 16 shm, 16 disk, 20 computed"


def test_an_answer_has_speed_latency_and_sources() -> None:
    figures = answer_figures(Usage(34, 21, 32, {"device": 32}), Timing(0.0, 0.5, 1.0))

    assert figures == "21 tokens · 40.0 tokens/s · first token after 0.50 s · prompt of 34 tokens: 32 device, 2 computed"


def test_one_token_has_no_speed() -> None:
    assert "tokens/s" not in answer_figures(Usage(3, 1), Timing(0.0, 0.5, 0.5))
