"""The rows of peers.py as a table, ratios and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds of one system under one workload. ``rounds`` holds each round's tokens/s."""

    system: str
    weights: str
    workload: str
    concurrency: int
    output_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    peak_rss_mb: float
    ready_s: float
    rounds: tuple[float, ...]


def joined(rows: Sequence[Row]) -> list[Row]:
    """One row per system and workload out of one per round."""
    keys = list(dict.fromkeys((row.system, row.workload, row.concurrency) for row in rows))
    return [_median([r for r in rows if (r.system, r.workload, r.concurrency) == key]) for key in keys]


def _median(rows: Sequence[Row]) -> Row:
    figures = {
        name: round(statistics.median(getattr(row, name) for row in rows), 3)
        for name in ("output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "peak_rss_mb", "ready_s")
    }
    each = tuple(round(row.output_tokens_per_s, 1) for row in rows)
    return Row(**{**asdict(rows[0]), **figures, "rounds": each})


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line per row, with each system's ratio to `pagemill` (fp32) under the same workload."""
    ours = {(r.workload, r.concurrency): r.output_tokens_per_s for r in rows if r.system == "pagemill"}
    head = "workload | at once | system | weights | tokens/s | of pagemill fp32 | TTFT p50 ms | p99 | TPOT p50 ms"
    head += " | peak MB | ready s"
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    order = list(dict.fromkeys((row.workload, row.concurrency) for row in rows))
    for row in sorted(rows, key=lambda row: order.index((row.workload, row.concurrency))):
        base = ours.get((row.workload, row.concurrency))
        ratio = f"{row.output_tokens_per_s / base:.2f}" if base else ""
        cells = (row.workload, row.concurrency, row.system, row.weights, f"{row.output_tokens_per_s:.1f}", ratio)
        times = (f"{row.ttft_ms_p50:.0f}", f"{row.ttft_ms_p99:.0f}", f"{row.tpot_ms_p50:.1f}")
        lines.append(
            "| " + " | ".join(map(str, (*cells, *times, f"{row.peak_rss_mb:.0f}", f"{row.ready_s:.1f}"))) + " |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Output tokens per second over the number of requests at once, short prompts."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pagemill"  # the same file for the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for system in dict.fromkeys(row.system for row in rows):
        points = sorted(
            (r.concurrency, r.output_tokens_per_s) for r in rows if r.system == system and r.workload == "short"
        )
        if points:
            label = f"{system} ({next(r.weights for r in rows if r.system == system)})"
            axes.plot(*zip(*points, strict=True), marker="o", label=label, lw=2.5 if system.startswith("page") else 1.2)
    axes.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="output tokens/s")
    axes.set_xticks([1, 8, 32, 64], ["1", "8", "32", "64"])
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    axes.set_title("64 tokens in, 64 out")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
