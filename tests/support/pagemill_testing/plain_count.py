"""What a worker's blocks hold, counted the slow way."""

from __future__ import annotations

from pagemill_scheduler.waste import Waste
from pagemill_scheduler.worker import WorkerState


def plain_waste(worker: WorkerState) -> Waste:
    """``waste.measure`` slot by slot: a slot is filled when all who share its block count its token as computed."""
    table, size = worker.table, worker.block_size
    filled: dict[int, list[int]] = {}
    for slot in table.slots().tolist():
        computed = int(table.computed[slot])
        for index, block in enumerate(table.blocks_of(slot).tolist()):
            filled.setdefault(block, []).append(max(0, min(size, computed - index * size)))
    return Waste(
        allocated_slots=len(filled) * size,
        filled_slots=sum(min(counts) for counts in filled.values()),
        shared_blocks_saved=sum(len(counts) - 1 for counts in filled.values()),
    )
