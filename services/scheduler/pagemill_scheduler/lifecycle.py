"""The moves of a running or waiting request: preempt, finish a sequence, end, fail. Starting is in ``admission``."""

from __future__ import annotations

from pagemill_scheduler.request import Parked, Request, Sequence, Status
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState
from pagemill_shared.messages import FinishReason, RequestFailure

_REASONS = tuple(FinishReason)
"""By code; to call an enumeration takes longer."""


def preempt(state: State, request: Request, why: str, *, keep_blocks: bool = True) -> str:
    """Take a running request off its worker, all its sequences at once, and queue it where its arrival puts it.

    Its keys and values are swapped to host memory or dropped and recomputed later (paper §4.5). With ``keep_blocks``
    False the worker is lost: nothing can be swapped, and tokens on their way never arrive. Returns what was done:
    ``swap`` or ``recompute``.
    """
    worker = state.workers[request.worker]
    table = worker.table
    running = [sequence for sequence in request.sequences if sequence.slot >= 0]
    if request.beams is not None:
        # A step of a beam search moves all its beams, so it is taken back as a whole and repeated later.
        for sequence in running:
            table.computed[sequence.slot] -= table.planned[sequence.slot] - table.length[sequence.slot]
            if request.reports_more:  # what is on its way is not waited for
                table.computed[sequence.slot] = min(table.computed.item(sequence.slot), request.reported)
    filled = [sequence for sequence in running if table.computed[sequence.slot] > 0]
    swap = keep_blocks and _should_swap(state, worker, filled)
    if swap:
        _swap_out(state, worker, request, filled)
    else:
        for sequence in filled:
            sequence.parked = Parked([], int(table.computed[sequence.slot]))
    worker.vacate(running, keep_in_flight=keep_blocks and request.beams is None)
    if not keep_blocks:
        sample_anew(request)
    worker.take_seats(request, 0)
    request.move(Status.WAITING)
    request.worker = ""
    request.waits_for = why
    state.queue.add(request)
    return "swap" if swap else "recompute"


def sample_anew(request: Request) -> None:
    """The tokens on their way were lost. If they were the first ones, one row samples them for all sequences again."""
    if request.beams is None and all(len(s.tokens) == len(request.prompt) for s in request.unfinished):
        request.forked = request.width == 1


def _filled_blocks(worker: WorkerState, sequence: Sequence) -> list[int]:
    """The blocks of a running sequence that hold keys and values, or will once the plans in flight are done."""
    computed = int(worker.table.computed[sequence.slot])
    blocks: list[int] = worker.table.blocks_of(sequence.slot)[: worker.blocks_for(computed)].tolist()
    return blocks


def _should_swap(state: State, worker: WorkerState, filled: list[Sequence]) -> bool:
    mode = state.config.preemption_mode
    if mode == "recompute" or not filled:
        return False
    if any(worker.table.gated(sequence.slot) for sequence in filled):
        return False  # blocks that it shares are being recomputed and hold nothing yet
    blocks = {block for sequence in filled for block in _filled_blocks(worker, sequence)}
    if len(blocks) > worker.host.num_available:
        return False
    if mode == "swap":
        return True
    hello = worker.hello
    moving = 2 * len(blocks) * hello.block_bytes / max(hello.swap_bytes_per_s, 1.0)
    recomputing = len(blocks) * worker.block_size / max(hello.prefill_tokens_per_s, 1.0)
    return moving < recomputing


def _swap_out(state: State, worker: WorkerState, request: Request, filled: list[Sequence]) -> None:
    """Move the blocks of ``filled`` to host memory, each shared block once; no device reference is kept."""
    tables = [_filled_blocks(worker, sequence) for sequence in filled]
    device = list(dict.fromkeys(block for table in tables for block in table))
    host = worker.host.allocate(len(device)).tolist()
    to_host = dict(zip(device, host, strict=True))
    for sequence, table in zip(filled, tables, strict=True):
        sequence.parked = Parked([to_host[block] for block in table], int(worker.table.computed[sequence.slot]))
    worker.notes.swap_out.extend(to_host.items())
    request.swapped_to = worker.identity
    request.swapped_bytes += len(device) * worker.hello.block_bytes
    state.counters.swapped_out_blocks += len(device)


def _release_host(state: State, request: Request, leaving: list[Sequence]) -> None:
    """Free the host blocks that only ``leaving`` sequences of a swapped request refer to."""
    worker = state.workers[request.swapped_to]
    kept = {b for s in request.unfinished if s.parked and s not in leaving for b in s.parked.blocks}
    freed = {b for s in leaving if s.parked for b in s.parked.blocks} - kept
    # A swap-out that no plan has carried yet would write to a block that may be given away.
    worker.notes.swap_out = [pair for pair in worker.notes.swap_out if pair[1] not in freed]
    worker.host.release(sorted(freed), after_plan=False)
    for sequence in leaving:
        sequence.parked = None


def finish(state: State, worker: WorkerState, sequences: list[Sequence], codes: list[int]) -> None:
    """``sequences``, all running on ``worker``, have ended for the reasons ``codes`` (FinishReason)."""
    apart = worker.table.num_gates > 0
    for sequence in sequences:
        apart = apart or not sequence.request.forked
    if apart:
        for sequence, code in zip(sequences, codes, strict=True):
            sequence.finish = _REASONS[code]
            finish_one(state, sequence)
        return
    # Nobody waits for what any of them has or was to do: they can leave together.
    for sequence, code in zip(sequences, codes, strict=True):
        sequence.finish = _REASONS[code]
    worker.vacate(sequences, keep_in_flight=False)
    for sequence in sequences:
        request = sequence.request
        worker.take_seats(request, request.seats - 1)
        if not request.seats:
            state.counters.requests_finished += 1
            _forget(state, request, acknowledge=True)


def finish_one(state: State, sequence: Sequence) -> None:
    """A sequence has ended (its ``finish`` is set), wherever it is: free what it alone owns; its siblings go on."""
    request = sequence.request
    if request.status is Status.ENDED:
        return  # with a sibling that ended in the same step
    if not request.unfinished:
        state.counters.requests_finished += 1
        end(state, request, acknowledge=True)
    elif sequence.slot >= 0:
        worker = state.workers[request.worker]
        table = worker.table
        slot = sequence.slot
        dependents = [s for s in request.unfinished if s.slot >= 0 and table.gate[s.slot] == slot]
        stuck = any(table.gated(s.slot) for s in dependents)
        forks_later = not request.forked and not table.is_idle(slot)
        worker.vacate([sequence], keep_in_flight=False)
        worker.take_seats(request, request.seats - 1)
        if stuck or forks_later:
            preempt(state, request, "a sequence that its siblings waited for has ended")
    elif request.swapped_to:
        _release_host(state, request, [sequence])


def end(state: State, request: Request, *, acknowledge: bool) -> None:
    """Free all that a request owns and forget it; with ``acknowledge``, only once its gateway has heard of its end."""
    if request.status is Status.RUNNING:
        worker = state.workers[request.worker]
        worker.vacate([s for s in request.sequences if s.slot >= 0], keep_in_flight=False)
        worker.take_seats(request, 0)
    elif request.status is Status.WAITING:
        state.queue.remove(request)
        if request.swapped_to:
            _release_host(state, request, list(request.sequences))
            request.swapped_to = ""
    _forget(state, request, acknowledge=acknowledge)


def _forget(state: State, request: Request, *, acknowledge: bool) -> None:
    """The end of a request that owns nothing any more."""
    request.move(Status.ENDED)
    request.worker = ""
    del request.gateway.requests[request.handle]
    if acknowledge:
        request.gateway.delivery.ended.append(request)
    state.log(
        "info",
        "request ended",
        request_id=request.request_id,
        outcome="failed" if request.failure else "finished" if not request.unfinished else "aborted",
        prompt_tokens=len(request.prompt),
        output_tokens=[len(sequence.tokens) - len(request.prompt) for sequence in request.sequences],
        cached_tokens=request.cached_tokens,
        preemptions=request.preemptions,
        recomputed_tokens=request.recomputed_tokens,
        swapped_bytes=request.swapped_bytes,
    )


def fail(state: State, request: Request, code: str, message: str, param: str = "") -> None:
    """End a request with an error that its client will see."""
    request.failure = RequestFailure(request.handle, code, message[:2048], param)
    request.gateway.delivery.add_failure(request.failure)
    state.counters.requests_failed += 1
    state.log("warning", "request failed", request_id=request.request_id, code=code, reason=message)
    end(state, request, acknowledge=True)
