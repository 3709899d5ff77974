"""Makes the next iteration of one worker: who runs, who must go, who may come (paper §4.5)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from pagemill_scheduler import admission, grammars, lifecycle, naming, placement
from pagemill_scheduler.draft import NO_SLOTS, Draft, dispatch, table_of
from pagemill_scheduler.fresh import Fresh
from pagemill_scheduler.request import Request
from pagemill_scheduler.state import State
from pagemill_scheduler.table import Slots
from pagemill_scheduler.worker import AwaitedReport, WorkerState
from pagemill_shared.messages import IterationPlan, SequenceJoin
from pagemill_shared.schema import Int32Array, getter, layout_of

_ONE = np.ones((), np.int32)
_fields = getter([name for name, _ in layout_of(SequenceJoin).fields])

SHORT_SHARE = 10
"""One in so many tokens of the budget is for short newcomers while a longer prompt is being computed, but at most half
of the prompt tokens of an iteration."""


def make_plan(state: State, worker: WorkerState, now: float) -> IterationPlan | None:
    """The worker's next plan, or None when there is nothing for it to compute.

    Decode rows come first and take one token of the budget each; what is left goes to prefill chunks in order of
    arrival, then to newcomers, as far as the worker computes it soon enough. So a long prompt never stalls running
    streams. Nor does it stall short ones for long: while a prompt is computed in chunks, a small share of the budget is
    for newcomers that need no more than that.
    """
    draft = Draft(state.config.max_num_batched_tokens)
    if worker.table.num_awaiting:
        grammars.give_up_waiting(worker, now)
    if not worker.leaving:
        _make_way(state, worker)
    left = _decode(state, worker, draft)
    draft.budget = min(draft.budget, worker.prefill_budget)
    prefilling = _prefilling(worker, left)
    if prefilling and not worker.leaving:
        share = min(state.config.max_num_batched_tokens // SHORT_SHARE, worker.prefill_budget // 2)
        _start_newcomers(state, worker, draft, now, share)
    for slot in prefilling:
        if not draft.budget:
            break
        _add_chunk(state, worker, slot, draft)
    if not worker.leaving:
        _start_newcomers(state, worker, draft, now)
    if not len(draft.rows) and not draft.chunks and not draft.joined:
        return None
    return dispatch(worker, draft, now)


def _decode(state: State, worker: WorkerState, draft: Draft) -> Int32Array:
    """[table.top] how many known tokens each slot had not computed before."""
    table, pool = worker.table, worker.pool
    left, rows, growing, shared = _make_room(state, worker)
    if len(growing):
        draft.new_blocks.append(table.grow(growing, pool.allocate(len(growing))))
    if len(shared):
        _copy_on_write(state, worker, shared.tolist(), draft)
    after = table.planned[rows]
    table.computed[rows] = after
    table.planned[rows] = after + _ONE
    draft.rows = rows
    draft.budget -= len(rows)
    return left


def _make_room(state: State, worker: WorkerState) -> tuple[Int32Array, Slots, Slots, Slots]:
    """[table.top] known tokens that each slot has not computed; the rows that decode now; those of them that need one
    more block; those that write to a shared block.

    While there are too few free blocks, the request that comes last in order is preempted, whether it needs a block or
    not. The first in order always goes on: alone, every admitted request fits the pool.
    """
    table, pool = worker.table, worker.pool
    while True:
        top = table.top
        planned, computed = table.planned[:top], table.computed[:top]
        # A row whose last token is already on its way (planned up to its limit) sits this plan out, and so does a
        # beam whose step is out: all beams of a request step together.
        left = planned - computed
        ready = (left == _ONE) & (planned < table.limit[:top])
        if table.num_beams or table.num_chunked or table.num_gates or table.num_awaiting:
            ready = _hold_back(worker, ready)
        # A row that is ready has blocks for all that is computed, and none after the one that it writes to.
        grows = computed >= table.num_blocks[:top] * table.size
        grows &= ready
        rows, growing = ready.nonzero()[0], grows.nonzero()[0]
        shared, need = NO_SLOTS, len(growing)
        if table.num_siblings:
            writers = (ready & ~grows).nonzero()[0]
            targets = table.last_block[writers]
            several = pool.refs[targets] > _ONE
            if np.count_nonzero(several):
                shared = writers[several]
                need += _copies_needed(worker, targets[several])
        if need <= pool.num_free:
            return left, rows, growing, shared
        victim = table.sequence(int(table.ordered(table.slots())[-1])).request
        preempt_for(state, worker, victim, f"{need} blocks were needed to go on, {pool.num_free} were free")


def _hold_back(worker: WorkerState, ready: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """``ready``, with an entry for each slot up to the highest in use, without rows that go on in chunks, stand at a
    closed gate or wait for their grammar, and without beams whose request has a beam that is not ready."""
    table, top = worker.table, len(ready)
    for slot in np.flatnonzero(table.gate >= 0).tolist():
        table.gated(slot)
    ready = ready & ~table.chunked[:top] & (table.gate[:top] < 0) & (table.awaits[:top] == 0)
    beam, request = table.beam[:top], table.arrival[:top]
    ready &= ~(beam & (table.planned[:top] > table.length[:top]))
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
    writers = Counter(targets.tolist())
    return sum(min(count, worker.pool.refs.item(block) - 1) for block, count in writers.items())


def _copy_on_write(state: State, worker: WorkerState, slots: list[int], draft: Draft) -> None:
    """Before each of ``slots`` writes to its next position: copy that block, unless all others have left it (paper
    §4.4)."""
    table, pool = worker.table, worker.pool
    copying = [(slot, source) for slot in slots if pool.leave_shared(source := table.last_block.item(slot))]
    rows = []
    for (slot, source), target in zip(copying, pool.allocate(len(copying)).tolist(), strict=True):
        rows.append((slot, table.replace_last(slot, target), target))
        draft.copies.append((source, target))
    draft.new_blocks.append(table_of(rows, 3))
    state.counters.copied_blocks += len(copying)


def _prefilling(worker: WorkerState, left: Int32Array) -> list[int]:
    """Slots with known tokens to compute, more than the one of a decode row; first to be served first."""
    table = worker.table
    behind = left > _ONE
    if table.num_chunked:
        behind |= table.chunked[: len(left)]
    ordered: list[int] = table.ordered(behind.nonzero()[0]).tolist()
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
        siblings = [sibling for sibling in request.unfinished if sibling is not sequence]
        if siblings:
            worker.pool.share(table.blocks_of(slot), len(siblings))
            for sibling in siblings:
                table.fork(slot, sibling.slot)
                worker.notes.forks.append((slot, sibling.slot, sibling.index))
                slots.append(sibling.slot)
        table.expect_chunk(slot, False)
        request.forked = True
    for sampling in slots:
        table.planned[sampling] += 1
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
    """Start waiting requests on this worker, in order; with ``share`` only while they can compute all they have within
    so many tokens.

    Strictly in order: one that does not fit yet holds up those behind it, or a long request would starve. While
    requests are preempted, nothing of equal or lower priority that came later starts before them.
    """
    if not len(state.queue):
        return
    left_over = 0 if share is None else max(draft.budget - share, 0)
    claims = placement.Claims(state)
    fresh = Fresh(state, worker, now)
    passed = 0  # requests at the head of the queue that have been considered and are still in it
    while passed < len(state.queue):
        request = state.queue[passed]
        if not draft.budget:
            request.waits_for = "the next iteration: others take all tokens of this one"
            break
        if not request.is_fresh and request.in_flight:
            request.waits_for = "results of plans that were in flight when it was preempted"
            break
        claims.promise(worker, fresh.num_blocks)
        place = claims.place(request)
        key = fresh.key(request, place)
        if len(fresh) and (key is None or fresh.computes(key)):
            passed -= len(fresh)
            _start_fresh(worker, draft, fresh)
            claims.promise(worker, 0)
            place = claims.place(request)
            key = fresh.key(request, place)
        if isinstance(place, str):
            request.waits_for = place
            if request.swapped_to and request.swapped_to != worker.identity:
                claims.hold(request.swapped_to)  # it waits for the worker that holds it, not for this one
                passed += 1
                continue
            break
        if place.worker is not worker:
            claims.claim(place.worker, request, place.taken)
            request.waits_for = f"the next plan of worker {place.worker.identity}"
            passed += 1
            continue
        if share is not None and _work(worker, request, place.taken) > draft.budget - left_over:
            break
        if key is not None:
            draft.budget -= fresh.gather(request, place.taken, key, draft.budget)
            passed += 1  # it leaves the queue when it starts
        else:
            arrival = admission.start(state, worker, request, place.taken, now)
            draft.joined.extend([_fields(join) for join in arrival.joined])
            draft.swap_in.extend(arrival.swap_in)
            _run_newcomers(state, worker, arrival.joined, draft)
    if len(fresh):
        _start_fresh(worker, draft, fresh)


def _start_fresh(worker: WorkerState, draft: Draft, fresh: Fresh) -> None:
    """Start those that were gathered; their chunks have been taken from the budget already."""
    for starting in fresh.start():
        slot = starting.slot
        draft.joined.append(starting.join)
        complete = starting.start + starting.count == len(starting.request.prompt)
        samples = _sample_after_prompt(worker, slot, draft) if complete else 0
        draft.chunks.append((slot, starting.start, starting.count, samples))


def _work(worker: WorkerState, request: Request, taken: admission.Demand) -> int:
    """Tokens that ``request`` computes before it samples, at most."""
    return sum(len(s.tokens) for s in admission.starters(request)) - len(taken.cached) * worker.block_size


def _make_way(state: State, worker: WorkerState) -> None:
    """Preempt running requests of strictly lower priority if that lets the first waiting one start here.

    Equal priority never preempts for a newcomer.
    """
    request = next(iter(state.queue), None)
    if request is None or worker.table.lowest_priority <= request.priority or request.in_flight:
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
