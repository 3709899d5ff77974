"""Makes the next iteration of one worker: who runs, who must go, who may come (paper §4.5)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagemill_scheduler import lifecycle, placement
from pagemill_scheduler.request import Request
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import Flight, WorkerState
from pagemill_shared.messages import IterationPlan, SequenceJoin
from pagemill_shared.schema import Int32Array

Chunk = tuple[int, int, int, int]
"""(slot, start, count, samples), a row of IterationPlan.prefill_chunks."""


def make_plan(state: State, worker: WorkerState, now: float) -> IterationPlan | None:
    """The worker's next plan, or None when there is nothing for it to compute.

    Decode rows come first and take one token of the budget each; what is left goes to prefill chunks in order of
    arrival, then to newcomers. So a long prompt never stalls running streams.
    """
    table, pool = worker.table, worker.pool
    rows, growing = _make_room(state, worker, now)
    new_blocks = np.empty((len(growing), 3), np.int32)
    new_blocks[:, 0] = growing
    new_blocks[:, 1] = table.num_blocks[growing]
    new_blocks[:, 2] = pool.allocate(len(growing))
    table.blocks[growing, new_blocks[:, 1]] = new_blocks[:, 2]
    table.num_blocks[growing] += 1
    table.computed[rows] += 1
    table.pending[rows] += 1

    budget = state.config.max_num_batched_tokens - len(rows)
    chunks: list[Chunk] = []
    for slot in _prefilling(worker):
        if budget == 0:
            break
        budget -= _add_chunk(worker, slot, budget, chunks)
    joined: list[SequenceJoin] = []
    if not worker.leaving:
        for request in _newcomers(state, worker, budget, now):
            joined.append(_join(state, worker, request, now))
            budget -= _add_chunk(worker, joined[-1].slot, budget, chunks)
            if budget == 0:
                break

    if not len(rows) and not chunks:
        return None
    released = np.array(worker.released, np.int32)
    worker.released.clear()
    worker.num_plans += 1
    prefill_chunks = np.array(chunks, np.int32).reshape(-1, 4)
    sampling_slots = prefill_chunks[prefill_chunks[:, 3] > 0, 0]
    plan = IterationPlan(
        epoch=worker.outgoing.epoch,
        iteration=worker.outgoing.next(),
        released=released,
        joined=tuple(joined),
        new_blocks=new_blocks,
        decode_rows=rows,
        prefill_chunks=prefill_chunks,
    )
    num_tokens = len(rows) + int(prefill_chunks[:, 2].sum())
    if not worker.flights:
        worker.progress_at = now
    worker.flights.append(Flight(plan.iteration, np.concatenate([rows, sampling_slots]), num_tokens, now))
    return plan


def _make_room(state: State, worker: WorkerState, now: float) -> tuple[Int32Array, Int32Array]:
    """The rows that decode now, and those among them that need one more block, of which enough are free.

    While too few are, the request that comes last in order is preempted, whether it needs a block or not. The first
    in order always goes on: alone, every admitted request fits the pool.
    """
    table, pool = worker.table, worker.pool
    while True:
        order = table.order()
        length = table.length[order] + table.pending[order]
        computed = table.computed[order]
        # A row whose last token is already on its way (pending up to its limit) sits this plan out.
        ready = (length - computed == 1) & (length < table.limit[order])
        rows = order[ready]
        growing = rows[computed[ready] // table.block_size >= table.num_blocks[rows]]
        if len(growing) <= pool.num_free:
            return rows, growing
        victim = table.sequence(int(order[-1])).request
        why = f"preempted: {len(growing)} blocks were needed, {pool.num_free} were free"
        lifecycle.preempt(state, victim, why)
        worker.num_preemptions += 1
        state.counters.preemptions += 1
        state.log(
            "info",
            "preempted",
            request_id=victim.request_id,
            worker=worker.identity,
            mode="recompute",
            needed_blocks=len(growing),
            free_blocks=pool.num_free,
        )


def _prefilling(worker: WorkerState) -> list[int]:
    """Slots with more than one known token to compute, first to be served first."""
    order = worker.table.order()
    left = worker.table.length[order] + worker.table.pending[order] - worker.table.computed[order]
    return [int(slot) for slot in order[left > 1]]


def _add_chunk(worker: WorkerState, slot: int, budget: int, chunks: list[Chunk]) -> int:
    """Compute as many of the slot's known tokens as the budget allows; sample behind the last. Returns the tokens."""
    table = worker.table
    start = int(table.computed[slot])
    count = min(int(table.length[slot]) - start, budget)
    samples = int(start + count == table.length[slot])
    table.computed[slot] += count
    table.pending[slot] += samples
    chunks.append((slot, start, count, samples))
    return count


def _newcomers(state: State, worker: WorkerState, budget: int, now: float) -> Iterator[Request]:
    """Waiting requests to start on this worker now, in order. The caller starts each before it takes the next.

    Strictly in order: one that does not fit yet holds up those behind it, or a long request would starve.
    """
    if budget == 0:
        return
    claims = placement.Claims(state)
    for request in list(state.queue):
        if request.in_flight:
            request.waits_for = "results of plans that were in flight when it was preempted"
            return
        target, why = claims.place(request)
        if target is None:
            request.waits_for = why
            return
        if target is worker:
            yield request
        else:
            claims.claim(target, request)
            request.waits_for = f"the next plan of worker {target.identity}"


def _join(state: State, worker: WorkerState, request: Request, now: float) -> SequenceJoin:
    blocks = lifecycle.start(state, worker, request, now)
    [sequence] = request.sequences
    return SequenceJoin(
        slot=sequence.slot,
        sequence=sequence.index,
        prompt_length=len(request.prompt),
        computed=0,
        token_ids=sequence.tokens,
        block_table=blocks,
        sampling=request.sampling,
    )
