"""The executor called in one process: the same engine, driven by the same messages, without gRPC and without a worker."""

import time
from collections.abc import Callable

from executor_svc import convert
from executor_svc.engine import Engine, build_engine
from executor_svc.model.prepare import prepare_model
from executor_svc.runner import StepOutcome
from executor_svc.settings import ExecutorSettings
from octavo.executor.v1 import executor_service_pb2 as pb


class InProcessExecutor:
    """An engine and one endless session with it. Not for threads.

    Attributes:
        info: what GetExecutorInfo would answer.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.info = engine.info

    @classmethod
    def from_settings(cls, settings: ExecutorSettings, progress: Callable[[str], None] = print) -> "InProcessExecutor":
        """Builds the engine.

        Raises:
            StartupError: see prepare_model and build_engine.
        """
        folder = prepare_model(settings.model, settings.cache_dir, progress, needs_weights=settings.load_format == "auto")
        return cls(build_engine(settings, folder, progress))

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        """Carries one plan out.

        Raises:
            InvalidParameter: the plan makes no sense.
        """
        outcome = self._engine.runner.execute(convert.plan_from_pb(plan), began_at=time.monotonic())
        return convert.outcome_to_pb(outcome, idle_s=0.0)

    def submit(self, plan: pb.StepPlan, report: Callable[[pb.StepResult | Exception], None]) -> None:
        """Starts one plan; further ones may be submitted before it is over.

        Args:
            plan: the next one.
            report: called once, in the order of plans, on whatever thread the result becomes known.

        Raises:
            InvalidParameter: the plan makes no sense.
        """

        def report_message(outcome: StepOutcome | Exception) -> None:
            if not isinstance(outcome, Exception):
                report(convert.outcome_to_pb(outcome, idle_s=outcome.idle_s))
            else:
                report(outcome)

        self._engine.runner.submit(convert.plan_from_pb(plan), report_message, arrived_at=time.monotonic())

    def reset(self) -> None:
        """Drops all sequences: the next plan is the first of a session."""
        self._engine.runner.reset()
