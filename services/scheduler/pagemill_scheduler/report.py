"""The state as JSON-compatible values, for ``/v1/pagemill/state`` and metrics."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice

from pagemill_scheduler import grammars, waste
from pagemill_scheduler.request import Request, Status
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState

MAX_LISTED_REQUESTS = 1000


def snapshot(state: State, now: float) -> dict[str, object]:
    """See docs/api.md. Lists at most MAX_LISTED_REQUESTS requests, running ones first."""
    running = sum(1 for request in state.requests() if request.status is Status.RUNNING)
    total = sum(worker.pool.num_blocks for worker in state.workers.values())
    used = sum(worker.pool.num_used for worker in state.workers.values())
    counters = {f"{name}_total": value for name, value in asdict(state.counters).items()}
    listed = sorted(state.requests(), key=lambda r: (r.status is not Status.RUNNING, r.rank))
    wastes = {worker.identity: waste.measure(worker) for worker in state.workers.values()}
    ahead = {id(request): place for place, request in enumerate(state.queue)}
    return {
        "metrics": {
            "num_requests_running": running,
            "num_requests_waiting": len(state.queue),
            "kv_cache_usage_perc": used / total if total else 0.0,
            "kv_slots_allocated": sum(figures.allocated_slots for figures in wastes.values()),
            "kv_slots_filled": sum(figures.filled_slots for figures in wastes.values()),
            "kv_blocks_saved_by_sharing": sum(figures.shared_blocks_saved for figures in wastes.values()),
            "num_requests_swapped": sum(1 for request in state.queue if request.swapped_to),
            "num_preemptions_total": counters.pop("preemptions_total"),
            **counters,
        },
        "stopping": state.stopping,
        "ready_workers": len(state.ready_workers()),
        "workers": [_worker(worker, wastes[worker.identity], now) for worker in state.workers.values()],
        "gateways": [
            {"identity": gateway.identity, "connected": gateway.peer is not None, "requests": len(gateway.requests)}
            for gateway in state.gateways.values()
        ],
        "requests": [
            _request(state, request, ahead.get(id(request), 0), now) for request in islice(listed, MAX_LISTED_REQUESTS)
        ],
        "requests_total": running + len(state.queue),
    }


def _worker(worker: WorkerState, figures: waste.Waste, now: float) -> dict[str, object]:
    hello, pool = worker.hello, worker.pool
    return {
        "identity": worker.identity,
        "state": "leaving" if worker.leaving else "ready",
        "model": hello.model,
        "device": hello.device,
        "dtype": hello.dtype,
        "kernels": hello.kernels,
        "epoch": worker.outgoing.epoch,
        "iteration": worker.outgoing.sent,
        "plans_in_flight": len(worker.flights),
        "plans_total": worker.num_plans,
        "preemptions_total": worker.num_preemptions,
        "running_sequences": len(worker.table),
        "last_heard_seconds_ago": round(now - worker.last_heard, 3),
        "prefill_tokens_per_s": hello.prefill_tokens_per_s,
        "prefill_budget": worker.prefill_budget,
        "blocks": {
            "size": hello.block_size,
            "total": pool.num_blocks,
            "used": pool.num_used,
            "free": pool.num_free,
            "evictable": pool.num_evictable,
            "bytes_each": hello.block_bytes,
        },
        "swap_blocks": {"total": worker.host.num_blocks, "free": worker.host.num_free},
        "waste": asdict(figures),
    }


def _request(state: State, request: Request, ahead: int, now: float) -> dict[str, object]:
    output = sum(max(len(state.tokens_of(s)) - len(request.prompt), 0) for s in request.sequences)
    return {
        "request_id": request.request_id,
        "status": request.status.value,
        "worker": request.worker or None,
        "waits_for": _waits_for(state, request, ahead, now) or None,
        "requests_ahead": ahead,
        "sequences": len(request.sequences),
        "priority": request.priority,
        "age_seconds": round(now - request.arrived_at, 3),
        "prompt_tokens": len(request.prompt),
        "output_tokens": output,
        "preemptions": request.preemptions,
        "cached_tokens": request.cached_tokens,
        "recomputed_tokens": request.recomputed_tokens,
        "swapped_bytes": request.swapped_bytes,
        "swapped_out": bool(request.swapped_to),
        "worker_deaths": request.deaths,
    }


def _waits_for(state: State, request: Request, ahead: int, now: float) -> str:
    if request.waits_for or request.status is Status.RUNNING:
        return request.waits_for or grammars.waits_for(state, request)
    # No plan has considered it: there was none since it came, or none got past those before it.
    workers = state.ready_workers()
    if not workers:
        return "no worker is ready"
    if ahead and next(iter(state.queue)).waits_for:
        return f"its turn: {ahead} before it in the queue"
    busy = [worker for worker in workers if worker.flights]
    if len(busy) < len(workers):
        return "the next plan"
    worker = min(busy, key=lambda w: w.progress_at)
    return f"the iteration under way on worker {worker.identity}, for {now - worker.progress_at:.1f} s so far"
