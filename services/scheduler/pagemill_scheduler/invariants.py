"""What must hold after every event. A violation is a bug of the scheduler, never of a peer."""

from __future__ import annotations

import numpy as np

from pagemill_scheduler.request import Status
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState


class InvariantError(Exception):
    """The scheduler's state contradicts itself."""


def _require(condition: object, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def check(state: State) -> None:
    """
    Raises:
        InvariantError: names the first contradiction found.
    """
    for worker in state.workers.values():
        _check_pool(worker)
        _check_host(state, worker)
        _check_rows(worker)
        _check_flights(worker)
        _check_notes(worker)
    _check_queue(state)


def _check_pool(worker: WorkerState) -> None:
    pool, table, name = worker.pool, worker.table, worker.identity
    refs = np.zeros_like(pool.refs)
    for slot in table.slots():
        np.add.at(refs, table.blocks_of(int(slot)), 1)
    _require(refs[0] == 0, f"{name}: the padding block is in use")
    wrong = np.flatnonzero(refs != pool.refs)
    _require(not len(wrong), f"{name}: blocks {wrong.tolist()} have {refs[wrong]} owners, not {pool.refs[wrong]}")
    free = pool.unused_blocks().tolist() + pool.evictable_blocks()
    _require(len(set(free)) == len(free), f"{name}: a block is free twice")
    _require(not pool.refs[free].any(), f"{name}: a free block has an owner")
    used = int((pool.refs[1:] > 0).sum())
    _require(used + len(free) == pool.num_blocks, f"{name}: {used} used + {len(free)} free blocks")
    _require(len(free) == pool.num_free, f"{name}: {len(free)} free blocks, counted {pool.num_free}")
    _require(not pool.names.named[pool.unused_blocks()].any(), f"{name}: an unused block has a name")
    _require(pool.names.named[pool.evictable_blocks()].all(), f"{name}: an evictable block has no name")


def _check_host(state: State, worker: WorkerState) -> None:
    owned: set[int] = set()
    for request in state.queue:
        if request.swapped_to == worker.identity:
            owned |= {block for s in request.unfinished if s.parked for block in s.parked.blocks}
    free = worker.host.free_blocks()
    _require(len(set(free)) == len(free), f"{worker.identity}: a host block is free twice")
    _require(not owned & set(free), f"{worker.identity}: a host block in use is free")
    total = len(owned) + len(free)
    _require(total == worker.host.num_blocks, f"{worker.identity}: {len(owned)} used + {len(free)} free host blocks")


def _check_rows(worker: WorkerState) -> None:
    table, name = worker.table, worker.identity
    _require(len(table.slots()) + table.num_free == table.capacity, f"{name}: slots were lost")
    seats = {id(s.request): s.request.seats for s in table.sequences()}
    _require(sum(seats.values()) == worker.seats_taken, f"{name}: seats {seats} are not {worker.seats_taken}")
    _require(int((table.gate >= 0).sum()) == table.num_gates, f"{name}: gates miscounted")
    _require(int(table.beam.sum()) == table.num_beams, f"{name}: beams miscounted")
    siblings = sum(s.request.width > 1 for s in table.sequences())
    _require(siblings == table.num_siblings, f"{name}: siblings miscounted")
    _require(int((table.awaits > 0).sum()) == table.num_awaiting, f"{name}: rows that wait for grammars miscounted")
    _require(int(table.chunked.sum()) == table.num_chunked, f"{name}: rows that go on in chunks miscounted")
    for slot in table.slots().tolist():
        sequence = table.sequence(slot)
        request = sequence.request
        who = f"{name} slot {slot} ({request.request_id})"
        length = int(table.length[slot])
        pending = int(table.planned[slot]) - length
        computed, blocks = int(table.computed[slot]), int(table.num_blocks[slot])
        _require(sequence.slot == slot and request.worker == name, f"{who}: does not know its slot")
        _require(request.status is Status.RUNNING, f"{who}: is {request.status.value}")
        _require(sequence.in_flight == 0, f"{who}: runs although earlier results are on their way")
        _require(not sequence.finished, f"{who}: has finished")
        if table.is_idle(slot):
            _require(not (pending or computed or blocks or request.forked), f"{who}: idle, but owns something")
            continue
        _require(length + pending <= table.limit[slot], f"{who}: {length}+{pending} tokens exceed {table.limit[slot]}")
        _require(not (pending and table.awaits[slot]), f"{who}: samples before its grammar is compiled")
        _require(0 <= pending <= 2, f"{who}: {pending} pending")
        most = length + pending - bool(request.sampling.max_tokens)
        _require(0 <= computed <= most, f"{who}: computed {computed} of {length}+{pending}")
        # On demand: what its known tokens need, or what the plans in flight write.
        least, most = worker.blocks_for(max(computed, 1)), worker.blocks_for(length + pending)
        _require(least <= blocks <= most, f"{who}: {blocks} blocks for {computed} of {length}+{pending} tokens")
        full = min(length, computed) // worker.block_size
        named = int(table.name_at[slot]) // worker.block_size - 1
        _require(named <= full, f"{who}: {named} blocks named, {full} are full")


def _check_flights(worker: WorkerState) -> None:
    table = worker.table
    pending = np.zeros(table.capacity, np.int32)
    for flight in worker.flights:
        np.add.at(pending, flight.slots[~flight.left], 1)
        for index, sequence in flight.orphans.items():
            _require(flight.left[index], f"{worker.identity}: token {index} has two owners")
            _require(sequence.slot < 0 or sequence.in_flight == 0, f"{worker.identity}: an orphan runs")
    slots = table.slots()
    expected = table.length[slots] + pending[slots]
    _require((expected == table.planned[slots]).all(), f"{worker.identity}: pending tokens miscounted")
    _require(pending.sum() == pending[slots].sum(), f"{worker.identity}: a token is on its way to an empty slot")
    for request in {id(s.request): s.request for s in table.sequences()}.values():
        if request.beams is not None:
            steps = {pending.item(s.slot) for s in request.sequences if s.slot >= 0}
            _require(len(steps) == 1, f"{worker.identity}: beams of {request.request_id} step apart")


def _check_notes(worker: WorkerState) -> None:
    notes = worker.notes
    slots = set(worker.table.slots().tolist())
    _require(notes.chosen.keys() <= slots, f"{worker.identity}: a token was chosen for an empty slot")
    _require({child for _, child, _ in notes.forks} <= slots, f"{worker.identity}: a fork fills an empty slot")
    _require(len(set(notes.released)) == len(notes.released), f"{worker.identity}: a slot is released twice")
    targets = [host for _, host in notes.swap_out]
    _require(len(set(targets)) == len(targets), f"{worker.identity}: two blocks are swapped out to one")


def _check_queue(state: State) -> None:
    queue = list(state.queue)
    _require(len({id(r) for r in queue}) == len(queue), "a request is queued twice")
    ranks = [request.rank for request in queue]
    _require(ranks == sorted(ranks), "the queue is out of order")
    waiting = {id(request) for request in queue}
    for request in state.requests():
        who = f"request {request.request_id}"
        queued = id(request) in waiting
        _require((request.status is Status.WAITING) == queued, f"{who}: {request.status.value}, queue disagrees")
        _require(request.status is not Status.ENDED, f"{who}: ended, but still known")
        if request.status is Status.WAITING:
            _require(all(s.slot < 0 for s in request.sequences), f"{who}: waits, but has a slot")
            _require(request.seats == 0, f"{who}: waits, but has seats")
        else:
            _require(not request.swapped_to, f"{who}: runs, but is swapped out")
        waiting.discard(id(request))
    _require(not waiting, "a request is queued that no gateway knows")
