"""Sequences whose output must match a grammar: they sample nothing before their worker has compiled it.

A worker begins when the sequence joins, beside its step path. Meanwhile the row computes all but its last known token,
so nothing needs to be taken back, whatever comes of the grammar. Everybody else goes on.
"""

from __future__ import annotations

import numpy as np

from pagemill_scheduler import lifecycle
from pagemill_scheduler.request import Request
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState
from pagemill_shared.grammar_limits import GRAMMAR_FAILED
from pagemill_shared.messages import GrammarCompiled

GRAMMAR_FIELD = "grammar"
"""What its gateway calls the field at fault is the gateway's business."""


def compiled(state: State, worker: WorkerState, message: GrammarCompiled) -> None:
    """A row can go on, or its request ends: its grammar cannot be compiled."""
    table = worker.table
    known = message.epoch == worker.outgoing.epoch and message.slot < table.capacity
    if not known or not message.iteration or table.awaits[message.slot] != message.iteration:
        state.counters.ignored_messages += 1  # the sequence has left meanwhile, or goes on without
        return
    if message.error:
        request = table.sequence(message.slot).request
        lifecycle.fail(state, request, GRAMMAR_FAILED, message.error, GRAMMAR_FIELD)
    else:
        table.go_on(message.slot)


def give_up_waiting(worker: WorkerState, now: float) -> None:
    """Rows that have waited too long go on: either only the message was lost, or the worker fails them."""
    table = worker.table
    for slot in np.flatnonzero((table.awaits > 0) & (table.awaits_until <= now)).tolist():
        table.go_on(slot)


def waits_for(state: State, request: Request) -> str:
    """Why a running request makes no progress, for people; empty if it waits for no grammar."""
    if not request.sampling.grammar or not request.worker:
        return ""
    table = state.workers[request.worker].table
    waiting = any(table.awaits[s.slot] for s in request.sequences if s.slot >= 0)
    return f"its grammar, which worker {request.worker} compiles" if waiting else ""
