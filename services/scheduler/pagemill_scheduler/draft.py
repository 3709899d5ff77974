"""The plan that is being made for a worker, and how it becomes the message that the worker gets."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from pagemill_scheduler.table import Slots
from pagemill_scheduler.worker import AwaitedReport, Flight, WorkerState
from pagemill_shared.messages import IterationPlan, SequenceJoin
from pagemill_shared.records import Rows
from pagemill_shared.schema import Int32Array

NO_SLOTS = np.zeros(0, np.intp)
_NO_NUMBERS = np.zeros(0, np.int32)
_NO_ROWS = {columns: np.zeros((0, columns), np.int32) for columns in (2, 3, 4)}


class Draft:
    """The plan being made. ``chunks`` are (slot, start, count, samples), as in IterationPlan.prefill_chunks.

    Attributes:
        entries: the slots behind the tokens that the chunks sample.
        reports: what the chunks will tell of their prompts.
        joined: the fields of each SequenceJoin.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: Slots = NO_SLOTS
        self.new_blocks: list[Int32Array] = []
        self.copies: list[tuple[int, int]] = []
        self.chunks: list[tuple[int, int, int, int]] = []
        self.entries: list[int] = []
        self.reports: list[AwaitedReport] = []
        self.joined: list[tuple[Any, ...]] = []
        self.swap_in: list[tuple[int, int]] = []


def table_of(rows: list[Any], columns: int) -> Int32Array:
    """[K, columns] of K tuples; flat first, because numpy takes nested ones apart slowly."""
    if not rows:
        return _NO_ROWS[columns]
    return np.fromiter(chain.from_iterable(rows), np.int32, len(rows) * columns).reshape(-1, columns)


def _list(numbers: list[int]) -> Int32Array:
    return np.array(numbers, np.int32) if numbers else _NO_NUMBERS


def dispatch(worker: WorkerState, draft: Draft, now: float) -> IterationPlan:
    """The plan that ``draft`` has become, which is in flight from now on."""
    notes = worker.notes
    worker.num_plans += 1
    rows = draft.rows.astype(np.int32)
    chunks = table_of(draft.chunks, 4)
    match draft.new_blocks:
        case []:
            new_blocks = _NO_ROWS[3]
        case [new_blocks]:
            pass
        case _:
            new_blocks = np.concatenate(draft.new_blocks)
    plan = IterationPlan(
        epoch=worker.outgoing.epoch,
        iteration=worker.outgoing.next(),
        released=_list(notes.released),
        joined=Rows(SequenceJoin, draft.joined) if draft.joined else (),
        forks=table_of(notes.forks, 3),
        new_blocks=new_blocks,
        chosen=table_of(list(notes.chosen.items()), 2),
        swap_out=table_of(notes.swap_out, 2),
        swap_in=table_of(draft.swap_in, 2),
        block_copies=table_of(draft.copies, 2),
        decode_rows=rows,
        prefill_chunks=chunks,
        reporting=_list([report.slot for report in draft.reports]),
    )
    worker.told()
    if not worker.flights:
        worker.progress_at = now
    slots = draft.rows
    if draft.entries:
        slots = np.empty(len(rows) + len(draft.entries), np.intp)
        slots[: len(rows)] = draft.rows
        slots[len(rows) :] = draft.entries
    num_tokens = len(rows) + sum([count for _, _, count, _ in draft.chunks])
    worker.flights.append(Flight(plan.iteration, slots, num_tokens, now, draft.reports))
    return plan
