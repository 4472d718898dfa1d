"""What the engine sees is what the forecast learns from, and the scaling signal follows."""

import pytest

from common.clock import ManualClock
from common.degraded import DegradedPaths
from common.errors import Cancelled
from scheduler_svc.core.forecast.quantity import Quantity
from scheduler_svc.engine import Engine
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.generation import Generation
from scheduler_svc.load_watch import LoadWatch
from scheduler_svc.metrics import EngineMetrics
from tests.unit.scheduler_svc.scripted_executor import RecordedOutput, ScriptedExecutor, ScriptedStore, make_request, settle


def ended(num_output_tokens: int, **changes: object) -> Generation:
    generation = Generation(make_request(prompt=range(1, 51)), RecordedOutput())
    generation.output = type("Output", (RecordedOutput,), {"num_tokens": num_output_tokens})()
    for name, value in changes.items():
        setattr(generation, name, value)
    return generation


def test_lengths_are_those_of_requests_that_ended_by_themselves() -> None:
    watch = LoadWatch(ManualClock(100.0))
    for _ in range(20):
        watch.note_arrival(make_request(prompt=range(1, 51)))
        watch.note_end(ended(6))
    watch.note_end(ended(1000, is_cancelled=True))
    assert watch.forecast.mean_tokens(Quantity.PROMPT_TOKENS) == 50
    assert watch.expected_output_tokens(make_request(max_tokens=100)) == pytest.approx(6)
    assert watch.expected_output_tokens(make_request(max_tokens=4)) == 4


def test_cached_tokens_need_no_executor() -> None:
    watch = LoadWatch(ManualClock(100.0))
    assert watch.computed_share == 1
    for _ in range(400):
        watch.note_end(ended(6, cached_tokens_by_tier={"device": 40}))
    assert watch.computed_share == pytest.approx(0.2)


async def test_an_engine_watches_its_load_and_publishes_what_it_expects() -> None:
    clock, executor, metrics = ManualClock(1000.0), ScriptedExecutor(), EngineMetrics()
    engine = metrics.engine = Engine([executor], EngineConfig(), clock, ScriptedStore(), DegradedPaths())
    await engine.start()
    await settle()
    for second in range(90):
        await engine.submit(make_request(f"r{second}", prompt=range(1, 20)), RecordedOutput())
        engine.cancel(make_request(f"r{second}").request_id, Cancelled("by the test"))
        clock.advance(1.0)
    engine.load_watch.forecast.advance(clock.now())
    assert engine.load_watch.forecast.expect(Quantity.REQUESTS, 10).median == pytest.approx(10, rel=0.1)
    labels = {"quantity": "prompt_tokens", "horizon_s": "60", "class": "", "quantile": "0.5"}
    assert metrics.registry.get_sample_value("octavo_forecast", labels) == pytest.approx(60 * 19, rel=0.1)
    labels = {"quantity": "requests", "horizon_s": "10", "class": "", "of": "distribution"}
    assert (metrics.registry.get_sample_value("octavo_forecast_error_ratio", labels) or 1.0) < 0.2
    assert metrics.registry.get_sample_value("octavo_desired_executors") == 1
    await engine.stop()
