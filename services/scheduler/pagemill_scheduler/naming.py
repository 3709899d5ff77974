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
    table = worker.table
    full = min(table.length.item(slot), table.computed.item(slot)) // worker.block_size
    first = table.named.item(slot)
    if full <= first:
        return
    chunks = table.chunks[slot, first:full].tolist()
    table.nodes[slot] = worker.pool.name_run(table.nodes[slot], chunks, table.blocks[slot, first:full])
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
    numbers = slots.tolist()
    parents = [table.nodes[slot] for slot in numbers]
    nodes = worker.pool.name_each(parents, table.chunks[slots, first].tolist(), table.blocks[slots, first])
    for slot, node in zip(numbers, nodes, strict=True):
        table.nodes[slot] = node
    table.named[slots] = first + 1
