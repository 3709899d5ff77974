"""What /metrics shows, under vLLM's names after the prefix.

Latencies and outcomes are the gateway's own. Everything about queues, cache and tokens comes from the scheduler, asked
anew for each scrape, so that no figure outlives what it tells of. All that the scheduler calls a metric is shown: a
counter where its name ends in ``_total``, a gauge otherwise.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT_BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_E2E_BOUNDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)

_HELP = {
    "num_requests_running": "Requests that the workers compute now",
    "num_requests_waiting": "Requests that wait to be computed",
    "kv_cache_usage_perc": "Share of the KV cache blocks in use, 1 is all of them",
    "kv_slots_allocated": "Token slots of the KV cache blocks in use",
    "kv_slots_filled": "Those that hold keys and values of a token; the rest is internal fragmentation",
    "kv_blocks_saved_by_sharing": "Blocks that would be needed on top if sequences shared none",
    "num_requests_swapped": "Requests whose blocks wait in a worker's host memory",
    "num_preemptions_total": "Sequences that lost their blocks to others",
    "prompt_tokens_total": "Prompt tokens computed",
    "generation_tokens_total": "Tokens generated",
}
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


class Histogram:
    """Counts of observations by upper bound. One observation costs a third of a microsecond; it is made per token."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, help_text: str, labels: Mapping[str, str]) -> Metric:
        family = HistogramMetricFamily(name, help_text, labels=list(labels))
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((_bound_name(bound), total))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


def _bound_name(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))


class GatewayMetrics:
    """The gateway's own figures, and the page that shows them beside the scheduler's.

    Args:
        prefix: before the colon of every name.
        model_name: value of the ``model_name`` label.
    """

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self._labels = {"model_name": model_name}
        self._first_token = Histogram(_TTFT_BOUNDS)
        self._next_token = Histogram(_ITL_BOUNDS)
        self._whole = Histogram(_E2E_BOUNDS)
        self._finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self._process = ProcessCollector(registry=None)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._next_token.observe(seconds)

    def finished(self, seconds: float, reason: str) -> None:
        """A sequence ended by itself; ``reason`` is its finish reason."""
        self._whole.observe(seconds)
        self._finished[reason] += 1

    def unfinished(self, reason: str) -> None:
        """A sequence was aborted by its client (``abort``) or ended with an ``error``."""
        self._finished[reason] += 1

    def page(self, scheduler: Mapping[str, Any] | None) -> bytes:
        """The exposition format.

        Args:
            scheduler: ``metrics`` of the scheduler's state as of now; None when it cannot be had.
        """
        return generate_latest(_Page([*self._own(), *self._of(scheduler), *self._process.collect()]))

    def _own(self) -> Iterable[Metric]:
        name, labels = f"{self._prefix}:", self._labels
        yield self._first_token.family(
            name + "time_to_first_token_seconds", "From the request's arrival to its first token", labels
        )
        yield self._next_token.family(
            name + "inter_token_latency_seconds", "From one token of a request to the next", labels
        )
        yield self._whole.family(
            name + "e2e_request_latency_seconds", "From the request's arrival to its last token", labels
        )
        success = CounterMetricFamily(
            name + "request_success", "Sequences that ended, by how they ended", labels=[*labels, "finished_reason"]
        )
        for reason, count in sorted(self._finished.items()):
            success.add_metric([*labels.values(), reason], count)
        yield success

    def _of(self, scheduler: Mapping[str, Any] | None) -> Iterable[Metric]:
        up = GaugeMetricFamily(f"{self._prefix}:scheduler_up", "Whether the scheduler answered this scrape")
        up.add_metric([], float(scheduler is not None))
        yield up
        for name, value in (scheduler or {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not _NAME.match(name):
                continue
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            help_text = _HELP.get(name, f"The scheduler's {name.removesuffix('_total').replace('_', ' ')}")
            family = kind(f"{self._prefix}:{name}", help_text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family


class _Page(CollectorRegistry):
    """What ``generate_latest`` wants to see: something that can be collected once."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return iter(self._families)
