"""Offers full blocks of running sequences to the prefix cache."""

from __future__ import annotations

import numpy as np

from pagemill_scheduler.table import Slots
from pagemill_scheduler.worker import WorkerState
from pagemill_shared.schema import Int32Array


def name_slot(worker: WorkerState, slot: int) -> None:
    """Name the blocks of ``slot`` that are full of known tokens and computed once the plans in flight are done.

    A block may be named as soon as the plan that computes it is made: plans run in order, so whoever finds the name
    reads it later (paper §4.4, and design of the order of memory operations in docs/protocol.md).
    """
    table, pool = worker.table, worker.pool
    full = min(table.length.item(slot), table.computed.item(slot)) // worker.block_size
    first = table.name_at.item(slot) // worker.block_size - 1
    if full <= first:
        return
    tokens = table.tokens[slot, first * worker.block_size : full * worker.block_size]
    table.node[slot] = pool.names.name_run(table.node.item(slot), tokens, table.blocks[slot, first:full])
    table.name_at[slot] = (full + 1) * worker.block_size


def name_rows(worker: WorkerState, slots: Slots, length: Int32Array) -> None:
    """``name_slot`` for those of ``slots`` that have filled a block. They are ``length`` tokens long."""
    table = worker.table
    at = table.name_at[slots]
    filled = (length >= at).nonzero()[0]
    if not len(filled):
        return
    slots, length, at = slots[filled], length[filled], at[filled]
    computed = table.computed[slots]
    after = at + table.size
    # Nearly always each has just filled one block, with a token that is computed next.
    if len((length != at).nonzero()[0]) or len((computed < at).nonzero()[0]):
        known = np.minimum(length, computed)
        one = (known >= at) & (known < after)
        for slot in slots[known >= after].tolist():
            name_slot(worker, slot)
        slots, at, after = slots[one], at[one], after[one]
        if not len(slots):
            return
    rows, blocks = table.filled(slots, at)
    table.node[slots] = worker.pool.names.name_each(table.node[slots], rows, blocks)
    table.name_at[slots] = after
