"""What must hold after every event. A violation is a bug of the scheduler, never of a peer."""

from __future__ import annotations

import numpy as np

from pagemill_scheduler.request import Status
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState


class InvariantError(RuntimeError):
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
        _check_rows(worker)
        _check_flights(worker)
    _check_queue(state)


def _check_pool(worker: WorkerState) -> None:
    pool, table = worker.pool, worker.table
    refs = np.zeros_like(pool.refs)
    for slot in table.order():
        np.add.at(refs, table.blocks_of(int(slot)), 1)
    _require(refs[0] == 0, f"{worker.identity}: the padding block is in use")
    wrong = np.flatnonzero(refs != pool.refs)
    _require(
        not len(wrong), f"{worker.identity}: blocks {wrong.tolist()} have {refs[wrong]} owners, not {pool.refs[wrong]}"
    )
    free = pool.free_blocks()
    _require(len(set(free.tolist())) == len(free), f"{worker.identity}: a block is free twice")
    _require(not pool.refs[free].any(), f"{worker.identity}: a free block has an owner")
    used = int((pool.refs[1:] > 0).sum())
    _require(used + pool.num_free == pool.num_blocks, f"{worker.identity}: {used} used + {pool.num_free} free blocks")


def _check_rows(worker: WorkerState) -> None:
    table, name = worker.table, worker.identity
    _require(len(table.order()) + table.num_free == table.capacity, f"{name}: slots were lost")
    for slot in table.order().tolist():
        sequence = table.sequence(slot)
        request = sequence.request
        who = f"{name} slot {slot} ({request.request_id})"
        length, pending = int(table.length[slot]), int(table.pending[slot])
        computed, blocks = int(table.computed[slot]), int(table.num_blocks[slot])
        _require(sequence.slot == slot and request.worker == name, f"{who}: does not know its slot")
        _require(request.status is Status.RUNNING, f"{who}: is {request.status.value}")
        _require(length + pending <= table.limit[slot], f"{who}: {length}+{pending} tokens exceed {table.limit[slot]}")
        _require(
            0 <= pending <= 2 and 0 <= computed < length + pending, f"{who}: computed {computed} of {length}+{pending}"
        )
        # On demand: what its known tokens need, or what the plans in flight write.
        least, most = worker.blocks_for(max(computed, 1)), worker.blocks_for(length + pending)
        _require(least <= blocks <= most, f"{who}: {blocks} blocks for {computed} of {length}+{pending} tokens")
        _require(sequence.in_flight == 0, f"{who}: runs although earlier results are on their way")
        # No write to a block with more than one owner: the next one goes to the block of position ``computed``.
        position = computed // worker.block_size
        if position < blocks:
            _require(worker.pool.refs[table.blocks[slot, position]] == 1, f"{who}: would write to a shared block")


def _check_flights(worker: WorkerState) -> None:
    pending = np.zeros(worker.table.capacity, np.int32)
    for flight in worker.flights:
        np.add.at(pending, flight.slots[flight.live], 1)
        for index, sequence in flight.orphans.items():
            _require(not flight.live[index], f"{worker.identity}: token {index} has two owners")
            _require(sequence.slot < 0 or sequence.in_flight == 0, f"{worker.identity}: an orphan runs")
    slots = worker.table.order()
    _require((pending[slots] == worker.table.pending[slots]).all(), f"{worker.identity}: pending tokens miscounted")
    _require(pending.sum() == pending[slots].sum(), f"{worker.identity}: a token is on its way to an empty slot")


def _check_queue(state: State) -> None:
    queue = list(state.queue)
    _require(len({id(r) for r in queue}) == len(queue), "a request is queued twice")
    keys = [request.key for request in queue]
    _require(keys == sorted(keys), "the queue is out of order")
    waiting = {id(request) for request in queue}
    for request in state.requests():
        who = f"request {request.request_id}"
        _require(
            (request.status is Status.WAITING) == (id(request) in waiting),
            f"{who}: {request.status.value}, queue disagrees",
        )
        _require(request.status is not Status.ENDED, f"{who}: ended, but still known")
        if request.status is Status.WAITING:
            _require(all(s.slot < 0 for s in request.sequences), f"{who}: waits, but has a slot")
        waiting.discard(id(request))
    _require(not waiting, "a request is queued that no gateway knows")
