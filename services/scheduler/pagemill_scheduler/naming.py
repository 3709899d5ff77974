"""Offers full blocks of running sequences to the prefix cache."""

from __future__ import annotations

import numpy as np

from pagemill_scheduler.worker import WorkerState
from pagemill_shared.schema import Int32Array


def name_slot(worker: WorkerState, slot: int) -> None:
    """Name the blocks of ``slot`` that are full of known tokens and computed once the plans in flight are done.

    A block may be named as soon as the plan that computes it is made: plans run in order, so whoever finds the name
    reads it later (paper §4.4, and design of the order of memory operations in docs/protocol.md).
    """
    table, pool, size = worker.table, worker.pool, worker.block_size
    full = min(int(table.length[slot]), int(table.computed[slot])) // size
    first = int(table.named[slot])
    if full <= first:
        return
    data = table.tokens[slot, first * size : full * size].tobytes()
    width = 4 * size
    node = table.nodes[slot]
    for i, block in enumerate(table.blocks[slot, first:full].tolist()):
        node = pool.name(node, data[i * width : (i + 1) * width], block)
    table.nodes[slot] = node
    table.named[slot] = full


def name_rows(worker: WorkerState, slots: Int32Array) -> None:
    """``name_slot`` for those of ``slots`` that have filled a block."""
    table = worker.table
    full = np.minimum(table.length[slots], table.computed[slots]) // worker.block_size
    for slot in slots[full > table.named[slots]].tolist():
        name_slot(worker, slot)
