"""Prometheus metrics of the worker: what steps and transfers did. Knows their outcomes, not how they came about."""

from prometheus_client import Counter, start_http_server

from common.errors import StartupError
from common.rpc.address import Address
from executor_svc.runner import StepOutcome
from executor_svc.transfer import LoadDone, SaveDone

_STEPS = Counter("octavo_executor_steps", "Steps carried out")
_TOKENS = Counter("octavo_executor_tokens", "Tokens computed, prompt and output")
_SECONDS = Counter("octavo_executor_step_seconds", "Where the time of steps went", ["part"])
_FAILURES = Counter("octavo_executor_failed_sequences", "Sequences that could not be computed")
_BLOCKS = Counter("octavo_executor_store_blocks", "Blocks loaded from and saved to the block store", ["outcome"])
_PARTS = {part: _SECONDS.labels(part) for part in ("idle", "prepare", "forward", "sample")}
_OUTCOMES = {outcome: _BLOCKS.labels(outcome) for outcome in ("loaded", "written", "present", "failed")}


def observe_step(outcome: StepOutcome, idle_s: float) -> None:
    """A step ended."""
    _STEPS.inc()
    _TOKENS.inc(outcome.num_tokens)
    _FAILURES.inc(len(outcome.failures))
    for part, seconds in (
        ("idle", idle_s),
        ("prepare", outcome.prepare_s),
        ("forward", outcome.forward_s),
        ("sample", outcome.sample_s),
    ):
        _PARTS[part].inc(max(0.0, seconds))


def observe_transfer(done: LoadDone | SaveDone) -> None:
    """A load or save ended."""
    if isinstance(done, LoadDone):
        _OUTCOMES["loaded"].inc(done.num_loaded)
        return
    for outcome, count in (("written", done.num_written), ("present", done.num_present), ("failed", done.num_failed)):
        _OUTCOMES[outcome].inc(count)


def serve_metrics(listen: str) -> None:
    """Serves them over HTTP until the process ends.

    Args:
        listen: host:port; empty: nothing is served.

    Raises:
        StartupError: the address cannot be bound.
    """
    if not listen:
        return
    host, _, port = Address.parse(listen).target.rpartition(":")
    try:
        start_http_server(int(port), host.strip("[]"))
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot serve metrics on {listen}: {error}") from error
