import pytest

from scheduler_svc.core.forecast.load_forecast import ALL, LoadForecast
from scheduler_svc.core.forecast.quantity import Quantity


def _serve(forecast: LoadForecast, num_seconds: int) -> float:
    """Every second: two short requests of a and one long of b, which end at once. Returns the time."""
    now_s = 1000.0
    for second in range(num_seconds):
        now_s = 1000.0 + second
        for service_class, tenant, num_prompt, num_output in (
            ("interactive", "a", 100, 20), ("interactive", "a", 100, 20), ("batch", "b", 800, 60),
        ):  # fmt: skip
            forecast.note_arrival(service_class, tenant, num_prompt, now_s)
            forecast.note_end(service_class, tenant, num_output, now_s)
    forecast.advance(now_s + 1)
    return now_s + 1


def test_forecasts_requests_and_tokens_of_all_and_by_class() -> None:
    forecast = LoadForecast()
    _serve(forecast, 300)
    assert forecast.expect(Quantity.REQUESTS, 10).median == pytest.approx(30, rel=0.05)
    assert forecast.expect(Quantity.PROMPT_TOKENS, 60).median == pytest.approx(60_000, rel=0.05)
    assert forecast.expect(Quantity.OUTPUT_TOKENS, 10, "interactive").median == pytest.approx(400, rel=0.05)
    assert forecast.expect(Quantity.PROMPT_TOKENS, 10, "batch").median == pytest.approx(8000, rel=0.05)
    assert forecast.service_classes == [ALL, "interactive", "batch"]


def test_a_tenant_gets_its_share() -> None:
    forecast = LoadForecast()
    _serve(forecast, 300)
    assert forecast.expect(Quantity.PROMPT_TOKENS, 10, tenant="a").median == pytest.approx(2000, rel=0.1)
    assert forecast.expect(Quantity.REQUESTS, 10, "interactive", "a").median == pytest.approx(20, rel=0.1)
    assert forecast.expect(Quantity.REQUESTS, 10, "interactive", "nobody").median == 0
    assert forecast.expect(Quantity.REQUESTS, 10, "unknown class").median == 0


def test_lengths_of_a_tenant_are_its_own_after_some_requests() -> None:
    forecast = LoadForecast()
    assert forecast.mean_tokens(Quantity.OUTPUT_TOKENS) > 0
    _serve(forecast, 300)
    assert forecast.mean_tokens(Quantity.PROMPT_TOKENS, ALL, "a") == pytest.approx(100, rel=0.1)
    assert forecast.mean_tokens(Quantity.OUTPUT_TOKENS, "batch") == pytest.approx(60)
    of_all = forecast.mean_tokens(Quantity.OUTPUT_TOKENS)
    assert forecast.mean_tokens(Quantity.OUTPUT_TOKENS, ALL, "new") == of_all == pytest.approx(100 / 3)


def test_blocks_hold_prompts_and_answers() -> None:
    forecast = LoadForecast()
    _serve(forecast, 300)
    assert forecast.expect_blocks(10, 16).median == pytest.approx(10 * 1100 / 16 + 15, rel=0.05)


def test_a_long_pause_of_the_process_costs_little_and_is_a_pause_of_the_load() -> None:
    forecast = LoadForecast()
    now_s = _serve(forecast, 300)
    forecast.advance(now_s + 86_400)
    assert forecast.expect(Quantity.REQUESTS, 10).median < 5


def test_errors_are_there_for_every_class_quantity_and_horizon() -> None:
    forecast = LoadForecast()
    _serve(forecast, 100)
    errors = {(name, quantity, horizon_s): e.relative for name, quantity, horizon_s, e in forecast.errors()}
    assert len(errors) == 3 * 3 * 2
    assert errors[ALL, Quantity.REQUESTS, 10] < 0.5


def test_the_number_of_tenants_that_are_remembered_is_bounded() -> None:
    forecast = LoadForecast()
    for number in range(5000):
        forecast.note_arrival(ALL, f"tenant {number}", 10, 1000.0 + number / 1000)
    assert len(forecast.tenants()) <= 4096
    assert "tenant 4999" in forecast.tenants()
