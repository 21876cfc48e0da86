"""Figures for Prometheus, in a registry of the server's own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from selfspec.inference.serve.scheduler import Scheduler

CONTENT_TYPE = CONTENT_TYPE_LATEST
_TIMES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """What `/metrics` shows. Counters may be moved from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        on = self.registry
        self.requests = Counter("selfspec_requests", "Answered requests.", ["path", "status"], registry=on)
        self.prompt_tokens = Counter("selfspec_prompt_tokens", "Tokens of prompts taken on.", registry=on)
        self.tokens = Counter("selfspec_generated_tokens", "Tokens of answers.", registry=on)
        self.finished = Counter("selfspec_answers", "Ended answers.", ["reason"], registry=on)
        self.first = Histogram("selfspec_first_token_seconds", "Until the first token.", buckets=_TIMES, registry=on)
        self.whole = Histogram("selfspec_answer_seconds", "Until the last token.", buckets=_TIMES, registry=on)
        self.rows = Histogram(
            "selfspec_rows_per_round", "Texts that shared a pass.", buckets=(1, 2, 4, 8, 16, 32), registry=on
        )

    def watch(self, scheduler: Scheduler) -> None:
        """Show the state of a scheduler, and what its rounds did."""
        on = self.registry
        Gauge("selfspec_running", "Answers being written.", registry=on).set_function(lambda: scheduler.running)
        Gauge("selfspec_waiting", "Requests in the queue.", registry=on).set_function(lambda: scheduler.waiting)
        self.registry.register(_Rounds(scheduler))

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class _Rounds(Collector):
    """Reads the statistics when they are asked for, instead of counting everything twice."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        stats, steering = self.scheduler.stats, self.scheduler.steering
        passes, off, probes = (0, 0, 0) if steering is None else steering.counts()
        for name, what, value in (
            ("rounds", "Passes of the target, times rows that took part.", stats.rounds),
            ("drafted_tokens", "Tokens that the draft proposed.", stats.proposed),
            ("accepted_tokens", "Proposed tokens that the target agreed with.", stats.accepted),
            ("committed_tokens", "Tokens that rounds committed, the target's own included.", stats.committed),
            ("guard_passes", "Passes over the batch that the guard chose the size of.", passes),
            ("guard_passes_off", "Those of them without guesses.", off),
            ("guard_probes", "Those of them tried though no gain was expected.", probes),
        ):
            yield CounterMetricFamily(f"selfspec_{name}", what, value=value)
        depths = CounterMetricFamily("selfspec_accepted_at_depth", "Rounds that accepted this depth.", labels=["depth"])
        for depth, count in enumerate(list(stats.reached), start=1):
            depths.add_metric([str(depth)], count)
        yield depths
        stages = CounterMetricFamily("selfspec_stage_seconds", "Time of the model's thread.", labels=["stage"])
        for stage, seconds in dict(stats.seconds).items():
            stages.add_metric([stage], seconds)
        yield stages
