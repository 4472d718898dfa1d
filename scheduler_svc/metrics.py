"""Prometheus metrics of the engine. Gauges and counters are read when asked for; only histograms are fed."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.core.forecast.capacity import SURE
from scheduler_svc.edge_line.session import EdgeSession
from scheduler_svc.engine import Engine
from scheduler_svc.generation import Generation
from scheduler_svc.prewarmer import Prewarmer

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class EngineMetrics(Collector):
    """What a scrape reads. Set engine before the first scrape; observe may be called before. edges: those that run, by name."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine: Engine | None = None
        self.prewarmer: Prewarmer | None = None
        self.edges: Callable[[], Mapping[str, EdgeSession]] = dict
        self._ttft = Histogram(
            "octavo_time_to_first_token_seconds",
            "From arrival to the first token",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._tpot = Histogram(
            "octavo_time_per_output_token_seconds",
            "Between output tokens of one sample, mean of a request",
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._queue = Histogram(
            "octavo_queue_seconds", "From arrival to a place in the batch", buckets=_LATENCY_BUCKETS, registry=self.registry
        )
        self.registry.register(self)

    def observe(self, generation: Generation) -> None:
        """A request ended."""
        if generation.admitted_at_s is not None:
            self._queue.observe(generation.queue_s)
        if generation.first_token_at_s is None or generation.ended_at_s is None:
            return
        self._ttft.observe(generation.time_to_first_token_s)
        num_later_tokens = generation.output.num_tokens / generation.request.n - 1
        if num_later_tokens > 0:
            self._tpot.observe((generation.ended_at_s - generation.first_token_at_s) / num_later_tokens)

    def collect(self) -> Iterator[Metric]:
        """Reads the engine."""
        if self.engine is None:
            return
        stats = [driver.stats() for driver in self.engine.drivers]
        counters = self.engine.counters
        num_blocks = sum(s.num_blocks for s in stats)
        num_used_blocks = sum(s.num_used_blocks for s in stats)
        yield _gauge("octavo_requests_waiting", "Requests in the queue", sum(s.num_waiting_requests for s in stats))
        yield _gauge("octavo_requests_running", "Requests in the batch", sum(s.num_running_requests for s in stats))
        yield _gauge("octavo_executors_connected", "Open sessions", sum(d.is_connected for d in self.engine.drivers))
        usage = num_used_blocks / num_blocks if num_blocks else 0.0
        yield _gauge("octavo_kv_cache_usage_ratio", "Used device blocks as a share of all", usage)
        if self.engine.model is not None:
            info = GaugeMetricFamily("octavo_cache_config_info", "Device pools", labels=["block_size", "num_gpu_blocks"])
            info.add_metric([str(self.engine.model.block_size), str(num_blocks)], 1)
            yield info
        requests = CounterMetricFamily("octavo_requests", "Requests that ended", labels=["outcome"])
        requests.add_metric(["finished"], counters.num_finished_requests)
        requests.add_metric(["failed"], counters.num_failed_requests)
        requests.add_metric(["cancelled"], counters.num_cancelled_requests)
        yield requests
        tokens = CounterMetricFamily("octavo_tokens", "Tokens of requests that ended", labels=["kind"])
        tokens.add_metric(["prompt"], counters.num_prompt_tokens)
        tokens.add_metric(["output"], counters.num_output_tokens)
        yield tokens
        cached = CounterMetricFamily("octavo_cached_tokens", "Prompt tokens that were not computed", labels=["tier"])
        for tier, num_tokens in counters.cached_tokens_by_tier.items():
            cached.add_metric([tier], num_tokens)
        yield cached
        preemptions = CounterMetricFamily("octavo_preemptions", "Sequences that lost their blocks and were computed again")
        preemptions.add_metric([], sum(s.num_preemptions for s in stats))
        yield preemptions
        yield from self._forecasts(self.engine)
        if self.prewarmer is not None:
            blocks = CounterMetricFamily("octavo_prewarmed_blocks", "Brought up for turns that were expected")
            blocks.add_metric([], self.prewarmer.num_blocks)
            yield blocks
            turns = CounterMetricFamily("octavo_prewarmed_turns", "Turns whose blocks were brought up", labels=["outcome"])
            turns.add_metric(["came"], self.engine.turns.num_warm_used)
            turns.add_metric(["did_not_come"], self.engine.turns.num_warm_unused)
            yield turns
        edge_requests = GaugeMetricFamily("octavo_edge_requests", "Open requests by edge process", labels=["edge"])
        edge_cpu = CounterMetricFamily("octavo_edge_cpu_seconds", "CPU time by edge process", labels=["edge"])
        for name, edge in self.edges().items():
            edge_requests.add_metric([name], edge.num_open_requests)
            edge_cpu.add_metric([name], edge.cpu_s)
        yield edge_requests
        yield edge_cpu
        degraded = CounterMetricFamily("octavo_degraded", "How often a degraded path was taken", labels=["path"])
        for path, count in self.engine.degraded.counts.items():
            degraded.add_metric([path], count)
        yield degraded

    def _forecasts(self, engine: Engine) -> Iterator[Metric]:
        watch = engine.load_watch
        expected = GaugeMetricFamily(
            "octavo_forecast", "Expected in the next seconds", labels=["quantity", "horizon_s", "class", "quantile"]
        )
        errors = GaugeMetricFamily(
            "octavo_forecast_error_ratio",
            "Mean error of forecasts lately (CRPS; of the median: absolute) as a share of what came",
            labels=["quantity", "horizon_s", "class", "of"],
        )
        for service_class, quantity, horizon_s, error in watch.forecast.errors():
            labels = [quantity.value, str(horizon_s), service_class]
            forecast = watch.forecast.expect(quantity, horizon_s, service_class)
            for level in (0.1, 0.5, SURE):
                expected.add_metric([*labels, f"{level:g}"], forecast.quantile(level))
            errors.add_metric([*labels, "distribution"], error.relative)
            errors.add_metric([*labels, "median"], error.relative_of_median)
        yield expected
        yield errors
        wanted = watch.desired_executors(engine.drivers)
        yield _gauge("octavo_desired_executors", "Executors that the load of the next minute wants", wanted)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
