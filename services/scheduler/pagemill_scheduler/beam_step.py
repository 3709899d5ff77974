"""Carries a step of beam search over to slots and blocks: forks beams that branch, frees beams that are dropped."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from pagemill_scheduler import lifecycle, naming
from pagemill_scheduler.beams import BeamSearch, Candidates, Continuation, entry_of
from pagemill_scheduler.request import LogprobEntry, Request, Sequence
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import Flight, WorkerState


def advance_all(
    state: State,
    worker: WorkerState,
    flight: Flight,
    indices: npt.NDArray[np.intp],
    entries: dict[int, LogprobEntry],
) -> None:
    """Advance every beam search that has rows among ``indices`` of the flight. All beams of one step together."""
    rows: dict[int, dict[int, LogprobEntry]] = defaultdict(dict)
    requests: dict[int, Request] = {}
    for index in indices.tolist():
        slot = int(flight.slots[index])
        request = worker.table.sequence(slot).request
        requests[request.arrival] = request
        rows[request.arrival][slot] = entries[index]
    for arrival, request in requests.items():
        _advance(state, worker, request, rows[arrival])


def _advance(state: State, worker: WorkerState, request: Request, entries: dict[int, LogprobEntry]) -> None:
    table, beams = worker.table, request.beams
    assert beams is not None
    running = [sequence for sequence in request.sequences if sequence.slot >= 0]
    candidates = [Candidates(entries[s.slot].token_ids, entries[s.slot].values) for s in running]
    outputs = [table.tokens_of(s.slot)[len(request.prompt) :] for s in running]
    continuations = beams.advance(candidates, outputs, [s.logprobs for s in running])
    state.counters.generation_tokens += len(continuations)
    if beams.done:
        _deliver(state, request, beams)
        return
    if request.sampling.logprobs is not None:
        count = request.sampling.logprobs
        logprobs = [
            [*running[c.parent].logprobs, entry_of(candidates[c.parent], c.token, count)] for c in continuations
        ]
    else:
        logprobs = [[] for _ in continuations]
    request.sequences = _rearrange(state, worker, request, running, continuations)
    request.forked = True
    for sequence, entry_list, continuation in zip(request.sequences, logprobs, continuations, strict=True):
        slot = sequence.slot
        sequence.logprobs = entry_list
        table.tokens[slot, table.length[slot]] = continuation.token
        table.length[slot] += 1
        table.planned[slot] = table.length.item(slot)
        worker.notes.chosen[slot] = continuation.token
        if state.config.prefix_caching:
            naming.name_slot(worker, slot)


def _rearrange(
    state: State,
    worker: WorkerState,
    request: Request,
    running: list[Sequence],
    continuations: list[Continuation],
) -> list[Sequence]:
    """The sequences of the next step, in the order of ``continuations``.

    The first continuation of a beam stays in its slot; each further one forks, into a slot that a dropped beam has
    left or that the request has reserved. Dropped beams leave first: that is the order in which a worker does it.
    """
    table = worker.table
    kept = {continuation.parent for continuation in continuations}
    worker.vacate([s for number, s in enumerate(running) if number not in kept], keep_in_flight=False)
    result: list[Sequence] = []
    used: set[int] = set()
    for index, continuation in enumerate(continuations):
        parent = running[continuation.parent]
        if continuation.parent not in used:
            used.add(continuation.parent)
            result.append(parent)
            continue
        child = Sequence(request, index, parent.tokens)
        slot = table.reserve(child)
        table.fork(parent.slot, slot)
        worker.pool.share(table.blocks_of(parent.slot))
        worker.notes.forks.append((parent.slot, slot, index))
        result.append(child)
    return result


def _deliver(state: State, request: Request, beams: BeamSearch) -> None:
    """Replace the beams by the best hypotheses, deliver them and end the request."""
    worker = state.workers[request.worker]
    worker.vacate(request.sequences, keep_in_flight=False)
    request.sequences = []
    for index, hypothesis in enumerate(beams.hypotheses[: request.sampling.n]):
        tokens = np.concatenate([request.prompt, hypothesis.tokens])
        sequence = Sequence(request, index, tokens, finish=hypothesis.finish, logprobs=hypothesis.logprobs)
        sequence.score = float(hypothesis.score)
        request.sequences.append(sequence)
        request.gateway.delivery.add_sequence(sequence, 0, hypothesis.tokens)
    state.counters.requests_finished += 1
    lifecycle.end(state, request, acknowledge=True)
