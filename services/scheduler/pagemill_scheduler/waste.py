"""How well the blocks in use are filled: the figures of the paper's §3.1 and §6 (fragmentation, sharing)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagemill_scheduler.worker import WorkerState


@dataclass(frozen=True, slots=True)
class Waste:
    """
    Attributes:
        allocated_slots: token slots of all blocks in use.
        filled_slots: those that hold keys and values of a token (once the plans in flight are done).
        shared_blocks_saved: blocks that would be needed on top if nothing were shared.
    """

    allocated_slots: int
    filled_slots: int
    shared_blocks_saved: int


def measure(worker: WorkerState) -> Waste:
    """One vectorised pass over the running rows."""
    table, pool, size = worker.table, worker.pool, worker.block_size
    slots = table.slots()
    slots = slots[table.num_blocks[slots] > 0]
    allocated = pool.num_used * size
    if not len(slots):
        return Waste(allocated, 0, 0)
    # Of the blocks that a row has, all those before its next position are full; what comes after is not filled yet.
    position = np.minimum(table.computed[slots] // size, table.num_blocks[slots] - 1)
    empty = np.zeros(pool.num_blocks + 1, np.int64)
    blocks = table.blocks[slots, position]
    left = (table.num_blocks[slots] * size - table.computed[slots]).astype(np.int64)
    np.maximum.at(empty, blocks, left)
    references = int(table.num_blocks[slots].sum())
    return Waste(allocated, max(allocated - int(empty.sum()), 0), references - pool.num_used)
