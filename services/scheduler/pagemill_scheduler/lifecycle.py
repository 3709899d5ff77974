"""The moves of a request: start, preempt, end. Each leaves queues, slots and blocks consistent."""

from __future__ import annotations

from pagemill_scheduler.request import Request, Sequence, Status
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState
from pagemill_shared.messages import RequestFailure
from pagemill_shared.schema import Int32Array


def start(state: State, worker: WorkerState, request: Request, now: float) -> Int32Array:
    """Move a waiting request onto ``worker``, with blocks for all of its known tokens.

    The whole sequence gets its blocks at once: were they handed out chunk by chunk, a long prompt could be thrown
    out half-way, over and over. Returns the blocks.
    """
    state.queue.remove(request)
    request.move(Status.RUNNING)
    request.worker = worker.identity
    request.waits_for = ""
    if request.started_at is None:
        request.started_at = now
        state.counters.prompt_tokens += len(request.prompt)
    [sequence] = request.sequences
    blocks = worker.pool.allocate(worker.blocks_for(len(sequence.tokens)))
    worker.table.join(sequence, blocks)
    return blocks


def preempt(state: State, request: Request, why: str, *, keep_in_flight: bool = True) -> None:
    """Take a running request off its worker, all its sequences at once, and queue it where its arrival puts it.

    Its keys and values are dropped: when it starts again they are recomputed from its tokens (paper §4.5).
    """
    worker = state.workers[request.worker]
    for sequence in _running(request):
        recompute = int(worker.table.computed[sequence.slot])
        request.recomputed_tokens += recompute
        state.counters.recomputed_tokens += recompute
        worker.vacate(sequence.slot, keep_in_flight=keep_in_flight)
    request.move(Status.WAITING)
    request.worker = ""
    request.preemptions += 1
    request.waits_for = why
    state.queue.add(request)


def end(state: State, request: Request, *, acknowledge: bool) -> None:
    """Free all that a request owns and forget it; with ``acknowledge``, only once its gateway has heard of its end."""
    if request.status is Status.RUNNING:
        worker = state.workers[request.worker]
        for sequence in _running(request):
            worker.vacate(sequence.slot, keep_in_flight=False)
    elif request.status is Status.WAITING:
        state.queue.remove(request)
    request.move(Status.ENDED)
    request.worker = ""
    del request.gateway.requests[request.handle]
    if acknowledge:
        request.gateway.delivery.ended.append(request)


def fail(state: State, request: Request, code: str, message: str, param: str = "") -> None:
    """End a request with an error that its client will see."""
    request.failure = RequestFailure(request.handle, code, message[:2048], param)
    request.gateway.delivery.add_failure(request.failure)
    state.counters.requests_failed += 1
    state.log("warning", "request failed", request_id=request.request_id, code=code, reason=message)
    end(state, request, acknowledge=True)


def _running(request: Request) -> list[Sequence]:
    return [sequence for sequence in request.sequences if sequence.slot >= 0]
