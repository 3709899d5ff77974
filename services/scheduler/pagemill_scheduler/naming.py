"""Offers full blocks of running sequences to the prefix cache."""

from __future__ import annotations

import numpy as np

from pagemill_scheduler.table import Slots
from pagemill_scheduler.worker import WorkerState


def name_slot(worker: WorkerState, slot: int) -> None:
    """Name the blocks of ``slot`` that are full of known tokens and computed once the plans in flight are done.

    A block may be named as soon as the plan that computes it is made: plans run in order, so whoever finds the name
    reads it later (paper §4.4, and design of the order of memory operations in docs/protocol.md).
    """
    table, pool = worker.table, worker.pool
    full = min(table.length.item(slot), table.computed.item(slot)) // worker.block_size
    first = table.named.item(slot)
    if full <= first:
        return
    tokens = table.tokens[slot, first * worker.block_size : full * worker.block_size]
    table.node[slot] = pool.names.name_run(table.node.item(slot), tokens, table.blocks[slot, first:full])
    table.named[slot] = full


def name_rows(worker: WorkerState, slots: Slots) -> None:
    """``name_slot`` for those of ``slots`` that have filled a block."""
    table = worker.table
    full = np.minimum(table.length[slots], table.computed[slots]) // worker.block_size
    first = table.named[slots]
    filled = (full > first).nonzero()[0]
    if not len(filled):
        return
    slots, first, full = slots[filled], first[filled], full[filled]
    several = full - first > 1
    if several.any():
        for slot in slots[several].tolist():
            name_slot(worker, slot)
        slots, first = slots[~several], first[~several]
    tokens = table.block_tokens[slots, first]
    table.node[slots] = worker.pool.names.name_each(table.node[slots], tokens, table.blocks[slots, first])
    table.named[slots] = first + 1
