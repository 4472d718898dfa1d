"""An engine with scripted executors, for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from common.clock import ManualClock
from common.degraded import DegradedPaths
from scheduler_svc.engine import Engine
from scheduler_svc.engine_config import EngineConfig
from tests.unit.scheduler_svc.scripted_executor import (
    ScriptedExecutor,
    ScriptedStore,
    settle,
)


@asynccontextmanager
async def running(
    *executors: ScriptedExecutor, store: ScriptedStore | None = None, clock: ManualClock | None = None, **config: Any
) -> AsyncIterator[Engine]:
    chosen = EngineConfig(**({"executor_wait_s": 0.01, "executor_lost_timeout_s": 100.0} | config))
    engine = Engine(executors, chosen, clock or ManualClock(), store or ScriptedStore(), DegradedPaths())
    await engine.start()
    await settle()
    try:
        yield engine
    finally:
        await engine.stop()
        check_integrity(engine)


def check_integrity(engine: Engine) -> None:
    for driver in engine.drivers:
        if driver.scheduler is not None:
            driver.scheduler.check_integrity()
