"""Makes the next iteration of one worker: who runs, who must go, who may come (paper §4.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from pagemill_scheduler import admission, grammars, lifecycle, naming, placement
from pagemill_scheduler.request import Request
from pagemill_scheduler.state import State
from pagemill_scheduler.table import Slots
from pagemill_scheduler.worker import AwaitedReport, Flight, WorkerState
from pagemill_shared.messages import IterationPlan, SequenceJoin
from pagemill_shared.schema import Int32Array

_NO_SLOTS = np.zeros(0, np.intp)

SHORT_SHARE = 10
"""One in so many tokens of an iteration is for short newcomers while a longer prompt is being computed."""


@dataclass(slots=True)
class Draft:
    """The plan being made. ``chunks`` are (slot, start, count, samples), as in IterationPlan.prefill_chunks.

    Attributes:
        entries: the slots behind the tokens that the chunks sample.
        reports: what the chunks will tell of their prompts.
    """

    budget: int
    rows: Slots = field(default_factory=lambda: _NO_SLOTS)
    new_blocks: list[Int32Array] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[tuple[int, int, int, int]] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    reports: list[AwaitedReport] = field(default_factory=list)
    joined: list[SequenceJoin] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


def make_plan(state: State, worker: WorkerState, now: float) -> IterationPlan | None:
    """The worker's next plan, or None when there is nothing for it to compute.

    Decode rows come first and take one token of the budget each; what is left goes to prefill chunks in order of
    arrival, then to newcomers. So a long prompt never stalls running streams. Nor does it stall short ones for long:
    while a prompt is computed in chunks, a small share of the budget is for newcomers that need no more than that.
    """
    draft = Draft(state.config.max_num_batched_tokens)
    if worker.table.num_awaiting:
        grammars.give_up_waiting(worker, now)
    if not worker.leaving:
        _make_way(state, worker)
    _decode(state, worker, draft)
    prefilling = _prefilling(worker)
    if prefilling and not worker.leaving:
        _start_newcomers(state, worker, draft, now, state.config.max_num_batched_tokens // SHORT_SHARE)
    for slot in prefilling:
        if not draft.budget:
            break
        _add_chunk(state, worker, slot, draft)
    if not worker.leaving:
        _start_newcomers(state, worker, draft, now)
    if not len(draft.rows) and not draft.chunks and not draft.joined:
        return None
    return _dispatch(worker, draft, now)


def _decode(state: State, worker: WorkerState, draft: Draft) -> None:
    table, pool = worker.table, worker.pool
    rows, growing, shared = _make_room(state, worker)
    if len(growing):
        draft.new_blocks.append(table.grow(growing, pool.allocate(len(growing))))
    for slot in shared.tolist():
        _copy_on_write(state, worker, slot, draft)
    table.computed[rows] += 1
    table.pending[rows] += 1
    draft.rows = rows
    draft.budget -= len(rows)


def _make_room(state: State, worker: WorkerState) -> tuple[Slots, Slots, Slots]:
    """The rows that decode now; those of them that need one more block; those that write to a shared block.

    While there are too few free blocks, the request that comes last in order is preempted, whether it needs a block or
    not. The first in order always goes on: alone, every admitted request fits the pool.
    """
    table, pool = worker.table, worker.pool
    while True:
        slots = table.slots()
        length = table.length[slots] + table.pending[slots]
        computed = table.computed[slots]
        # A row whose last token is already on its way (pending up to its limit) sits this plan out, and so does a
        # beam whose step is out: all beams of a request step together.
        ready = (length - computed == 1) & (length < table.limit[slots])
        if table.num_beams or table.num_chunked or table.num_gates or table.num_awaiting:
            ready = _hold_back(worker, slots, ready)
        rows = slots[ready]
        # A row that is ready has blocks for all that is computed, and none after the one that it writes to.
        grows = computed[ready] >= table.num_blocks[rows] * table.block_size
        growing, writers = rows[grows], rows[~grows]
        targets = table.last_block[writers]
        several = pool.refs[targets] > 1
        shared = writers[several]
        need = len(growing) + (_copies_needed(worker, targets[several]) if len(shared) else 0)
        if need <= pool.num_free:
            return rows, growing, shared
        victim = table.sequence(int(table.ordered(slots)[-1])).request
        preempt_for(state, worker, victim, f"{need} blocks were needed to go on, {pool.num_free} were free")


def _hold_back(worker: WorkerState, slots: Slots, ready: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """``ready`` without rows that go on in chunks, stand at a closed gate or wait for their grammar, and without beams
    whose request has a beam that is not ready."""
    table = worker.table
    for slot in np.flatnonzero(table.gate >= 0).tolist():
        table.gated(slot)
    ready = ready & ~table.chunked[slots] & (table.gate[slots] < 0) & (table.awaits[slots] == 0)
    ready &= ~(table.beam[slots] & (table.pending[slots] > 0))
    beam, request = table.beam[slots], table.arrival[slots]
    lagging = np.unique(request[beam & ~ready])
    return ready & ~(beam & np.isin(request, lagging))


def preempt_for(state: State, worker: WorkerState, victim: Request, why: str) -> None:
    """Preempt ``victim`` so that others can go on, and leave word of it."""
    victim.preemptions += 1
    worker.num_preemptions += 1
    state.counters.preemptions += 1
    mode = lifecycle.preempt(state, victim, f"preempted: {why}")
    state.log("info", "preempted", request_id=victim.request_id, worker=worker.identity, mode=mode, reason=why)


def _copies_needed(worker: WorkerState, targets: Int32Array) -> int:
    """Copies that make every write to ``targets`` (with repetitions) private: all but the last owner's."""
    blocks, writers = np.unique(targets, return_counts=True)
    return int(np.minimum(writers, worker.pool.refs[blocks] - 1).sum())


def _copy_on_write(state: State, worker: WorkerState, slot: int, draft: Draft) -> None:
    """Before ``slot`` writes to its next position: copy that block, unless all others have left it (paper §4.4)."""
    table, pool = worker.table, worker.pool
    source = table.last_block.item(slot)
    if pool.refs[source] == 1:
        return
    target = pool.allocate(1).item(0)
    pool.release([np.array([source], np.int32)])
    position = table.replace_last(slot, target)
    draft.copies.append((source, target))
    draft.new_blocks.append(np.array([[slot, position, target]], np.int32))
    state.counters.copied_blocks += 1


def _prefilling(worker: WorkerState) -> list[int]:
    """Slots with known tokens to compute, more than the one of a decode row; first to be served first."""
    table = worker.table
    slots = table.slots()
    left = table.length[slots] + table.pending[slots] - table.computed[slots]
    ordered: list[int] = table.ordered(slots[(left > 1) | table.chunked[slots]]).tolist()
    return ordered


def _add_chunk(state: State, worker: WorkerState, slot: int, draft: Draft) -> None:
    """Compute as many of the slot's known tokens as the budget allows; sample behind the last."""
    table = worker.table
    if table.gated(slot):
        return
    start, length = table.computed.item(slot), table.length.item(slot)
    last = length
    request = table.sequence(slot).request
    if request.beams is not None and request.beams.steps:
        last -= 1  # running beams sample together, as decode rows, once all of them have come this far
    elif table.awaits.item(slot):
        last -= 1  # the last token waits with it
    if start < request.reported < len(request.prompt):
        last = min(last, request.reported)  # a chunk is reported as a whole or not at all
    count = min(last - start, draft.budget)
    if count <= 0:
        return
    table.computed[slot] = start + count
    draft.budget -= count
    if state.config.prefix_caching:
        naming.name_slot(worker, slot)  # before it forks: the forks need not find the names again
    if request.reports_more and request.reported <= start < len(request.prompt):
        _report(worker, slot, start, start + count, draft)
    samples = 0
    if start + count == length and request.sampling.max_tokens:
        samples = _sample_after_prompt(worker, slot, draft)
    draft.chunks.append((slot, start, count, samples))


def _report(worker: WorkerState, slot: int, start: int, end: int, draft: Draft) -> None:
    """The chunk ``start`` … ``end`` - 1 tells what its request wants to hear of its prompt."""
    sequence = worker.table.sequence(slot)
    prompt_length = len(sequence.request.prompt)
    draft.reports.append(AwaitedReport(sequence, slot, start, min(end, prompt_length)))
    if end >= prompt_length:
        worker.table.expect_chunk(slot, False)


def _sample_after_prompt(worker: WorkerState, slot: int, draft: Draft) -> int:
    """The row samples its next token; the first row of a group samples one for each sequence, and forks."""
    table = worker.table
    sequence = table.sequence(slot)
    request = sequence.request
    slots = [slot]
    if not request.forked and request.beams is None:
        for sibling in request.unfinished:
            if sibling is not sequence:
                table.fork(slot, sibling.slot)
                worker.pool.share(table.blocks_of(slot))
                worker.notes.forks.append((slot, sibling.slot, sibling.index))
                slots.append(sibling.slot)
        table.expect_chunk(slot, False)
        request.forked = True
    for sampling in slots:
        table.pending[sampling] += 1
    draft.entries.extend(slots)
    return len(slots)


def _run_newcomers(state: State, worker: WorkerState, joined: list[SequenceJoin], draft: Draft) -> None:
    """Let those who have just joined run in the same plan as far as the budget goes.

    A sequence that comes back with one token left to compute decodes with the others from the next plan on, where it
    is seen to that it writes to no shared block.
    """
    for join in joined:
        resumed = len(join.token_ids) > join.prompt_length
        if draft.budget and len(join.token_ids) - join.computed > int(resumed):
            _add_chunk(state, worker, join.slot, draft)


def _start_newcomers(state: State, worker: WorkerState, draft: Draft, now: float, share: int | None = None) -> None:
    """Start waiting requests; with ``share`` only while they can compute all they have within so many tokens."""
    left_over = 0 if share is None else max(draft.budget - share, 0)
    for request, taken in _newcomers(state, worker, draft):
        if share is not None and _work(worker, request, taken) > draft.budget - left_over:
            return
        arrival = admission.start(state, worker, request, taken, now)
        draft.joined.extend(arrival.joined)
        draft.swap_in.extend(arrival.swap_in)
        _run_newcomers(state, worker, arrival.joined, draft)


def _work(worker: WorkerState, request: Request, taken: admission.Demand) -> int:
    """Tokens that ``request`` computes before it samples, at most."""
    return sum(len(s.tokens) for s in admission.starters(request)) - len(taken.cached) * worker.block_size


def _newcomers(state: State, worker: WorkerState, draft: Draft) -> Iterator[tuple[Request, admission.Demand]]:
    """Waiting requests to start on this worker now, in order. The caller starts each before it takes the next.

    Strictly in order: one that does not fit yet holds up those behind it, or a long request would starve. While
    requests are preempted, nothing of equal or lower priority that came later starts before them.
    """
    if not len(state.queue):
        return
    claims = placement.Claims(state)
    for request in list(state.queue):
        if not draft.budget:
            return
        if request.in_flight:
            request.waits_for = "results of plans that were in flight when it was preempted"
            return
        place = claims.place(request)
        if isinstance(place, str):
            request.waits_for = place
            if request.swapped_to and request.swapped_to != worker.identity:
                claims.hold(request.swapped_to)  # it waits for the worker that holds it, not for this one
                continue
            return
        if place.worker is worker:
            yield request, place.taken
        else:
            claims.claim(place.worker, request, place.taken)
            request.waits_for = f"the next plan of worker {place.worker.identity}"


def _make_way(state: State, worker: WorkerState) -> None:
    """Preempt running requests of strictly lower priority if that lets the first waiting one start here.

    Equal priority never preempts for a newcomer.
    """
    request = next(iter(state.queue), None)
    if request is None or request.in_flight or worker.lowest_priority <= request.priority:
        return
    if request.swapped_to not in ("", worker.identity) or not placement.can_ever_hold(state, worker, request):
        return
    if not isinstance(placement.Claims(state).place(request), str):
        return
    running = {id(s.request): s.request for s in worker.table.sequences()}
    lower = [r for r in running.values() if r.priority > request.priority and r.rank > request.rank]
    victims = sorted(lower, key=lambda r: r.rank, reverse=True)
    taken = admission.demand(state, worker, request)
    seated, chosen = worker.seats_taken, 0
    owned = np.zeros(0, np.int32)
    while not _would_fit(state, worker, request, taken, seated, owned):
        if chosen == len(victims):
            return
        victim = victims[chosen]
        chosen += 1
        seated -= victim.seats
        tables = [worker.table.blocks_of(s.slot) for s in victim.sequences if s.slot >= 0]
        owned = np.concatenate([owned, *tables])
    for victim in victims[:chosen]:
        preempt_for(state, worker, victim, f"request {request.request_id} has priority")


def _would_fit(
    state: State, worker: WorkerState, request: Request, taken: admission.Demand, seated: int, owned: Int32Array
) -> bool:
    """Whether ``request`` could start with ``seated`` seats taken and the block tables in ``owned`` given up."""
    blocks, owners = np.unique(owned, return_counts=True)
    freed = blocks[worker.pool.refs[blocks] == owners]
    # What is freed and what the request wants to share are the same blocks, to some part: they are no gain.
    gain = len(np.setdiff1d(freed, np.array(taken.cached, np.int32)))
    fits = taken.blocks + worker.reserve(state.config.watermark, seated) <= worker.pool.num_free + gain
    return fits and seated + request.seats_needed <= state.config.seats


def _table(rows: list[Any], columns: int) -> Int32Array:
    """[K, columns] of K tuples; flat first, because numpy takes nested ones apart slowly."""
    return np.fromiter(chain.from_iterable(rows), np.int32, len(rows) * columns).reshape(-1, columns)


def _dispatch(worker: WorkerState, draft: Draft, now: float) -> IterationPlan:
    notes = worker.notes
    worker.num_plans += 1
    rows = draft.rows.astype(np.int32)
    chunks = _table(draft.chunks, 4)
    plan = IterationPlan(
        epoch=worker.outgoing.epoch,
        iteration=worker.outgoing.next(),
        released=np.array(notes.released, np.int32),
        joined=tuple(draft.joined),
        forks=_table(notes.forks, 3),
        new_blocks=np.concatenate(draft.new_blocks) if draft.new_blocks else np.zeros((0, 3), np.int32),
        chosen=_table(list(notes.chosen.items()), 2),
        swap_out=_table(notes.swap_out, 2),
        swap_in=_table(draft.swap_in, 2),
        block_copies=_table(draft.copies, 2),
        decode_rows=rows,
        prefill_chunks=chunks,
        reporting=np.array([report.slot for report in draft.reports], np.int32),
    )
    worker.told()
    if not worker.flights:
        worker.progress_at = now
    slots = np.concatenate([draft.rows, np.array(draft.entries, np.intp)]) if draft.entries else draft.rows
    num_tokens = len(rows) + sum(count for _, _, count, _ in draft.chunks)
    worker.flights.append(Flight(plan.iteration, slots, num_tokens, now, draft.reports))
    return plan
