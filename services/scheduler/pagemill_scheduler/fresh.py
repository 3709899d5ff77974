"""Starts new requests together: what most plans bring. Whatever is out of the ordinary starts in ``admission``."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill_scheduler.admission import Demand
from pagemill_scheduler.arrays import joined
from pagemill_scheduler.placement import Place
from pagemill_scheduler.prefix_names import NO_KEY, Run
from pagemill_scheduler.request import Request, Status
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState
from pagemill_shared.schema import Int32Array


class Starting:
    """A request that starts.

    Attributes:
        cached: leading blocks that it shares, up to ``node``; named: those that have a name once it has started.
        key: of the first block after them, NO_KEY if that will not be full.
        num_blocks: blocks that it gets.
        start, count: the tokens of its prompt that it computes in the plan.
        slot: of its first sequence, once it has started; join: the fields of the SequenceJoin that the worker gets.
    """

    def __init__(
        self, request: Request, taken: Demand, key: int, num_blocks: int, start: int, count: int, named: int
    ) -> None:
        self.request = request
        self.cached, self.node = taken.cached, taken.node
        self.key = key
        self.num_blocks = num_blocks
        self.start, self.count = start, count
        self.named = named
        self.slot = -1
        self.join: tuple[Any, ...] = ()


class Fresh:
    """New requests that start on ``worker`` with its next plan. They are gathered one by one, as each takes from what
    is free, and then get blocks, names and slots all at once.

    Attributes:
        num_blocks: blocks that those gathered will get.
    """

    def __init__(self, state: State, worker: WorkerState, now: float) -> None:
        self._state, self._worker, self._now = state, worker, now
        self._gathered: list[Starting] = []
        self._keys: set[int] = set()
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._gathered)

    def key(self, request: Request, place: Place | str) -> int | None:
        """Of the first full block that ``request`` would compute; NO_KEY if there is none.

        None if it cannot start with the others: it is not fresh, or has no place here; or nobody has looked whether
        that block is cached, because its last token must be computed anyway.
        """
        if not request.is_fresh or isinstance(place, str) or place.worker is not self._worker:
            return None
        taken, size = place.taken, self._worker.block_size
        if taken.key != NO_KEY or not self._state.config.prefix_caching:
            return taken.key
        return None if len(request.prompt) - len(taken.cached) * size == size else NO_KEY

    def computes(self, key: int) -> bool:
        """Whether one of those gathered computes the block with this key, whose name is found once it has started."""
        return key in self._keys

    def gather(self, request: Request, taken: Demand, key: int, budget: int) -> int:
        """Let ``request`` start. How many tokens it computes, of at most ``budget``."""
        worker, lead = self._worker, len(taken.cached)
        if lead:
            worker.pool.share(np.array(taken.cached, np.int32))
        length, start = len(request.prompt), lead * worker.block_size
        count = min(length - start, budget)
        num_blocks = worker.blocks_for(length) - lead
        self.num_blocks += num_blocks
        worker.pool.make_room(self.num_blocks)
        worker.take_seats(request, request.width)
        if key == NO_KEY:
            named = lead
        else:
            named = (start + count) // worker.block_size
            self._keys.add(key)
        self._gathered.append(Starting(request, taken, key, num_blocks, start, count, named))
        return count

    def start(self) -> list[Starting]:
        """Start all that were gathered, as far as their rows and blocks go."""
        gathered, self._gathered = self._gathered, []
        fresh = self._worker.pool.allocate(self.num_blocks)
        self.num_blocks = 0
        self._keys.clear()
        self._state.queue.remove_first([starting.request for starting in gathered])
        tables = []
        first = 0
        for starting in gathered:
            last = first + starting.num_blocks
            tables.append(fresh[first:last])
            first = last
        self._name(gathered, tables)
        for starting, blocks in zip(gathered, tables, strict=True):
            self._join(starting, blocks)
        return gathered

    def _name(self, gathered: list[Starting], tables: list[Int32Array]) -> None:
        """Give names to the full blocks of all, which have none yet: before they fork, so that forks have them, too."""
        runs = []
        size = self._worker.block_size
        naming = [(s, blocks) for s, blocks in zip(gathered, tables, strict=True) if s.named > len(s.cached)]
        for starting, blocks in naming:
            tokens = starting.request.prompt[starting.start : starting.named * size]
            runs.append(Run(starting.node, starting.key, tokens, blocks[: starting.named - len(starting.cached)]))
        if runs:
            nodes = self._worker.pool.names.name_runs(runs)
            for (starting, _), node in zip(naming, nodes, strict=True):
                starting.node = node

    def _join(self, starting: Starting, blocks: Int32Array) -> None:
        state, worker, table = self._state, self._worker, self._worker.table
        request, start = starting.request, starting.start
        request.move(Status.RUNNING)
        request.worker, request.waits_for = worker.identity, ""
        request.started_at, request.cached_tokens = self._now, start
        counters, length = state.counters, len(request.prompt)
        counters.prompt_tokens += length
        counters.prefix_queries += length
        counters.prefix_hits += start
        if starting.cached:
            blocks = joined([np.array(starting.cached, np.int32), blocks])
        sequences = request.sequences
        slot = table.join(sequences[0], blocks, start + starting.count, starting.named, starting.node)
        starting.slot = slot
        starting.join = (slot, 0, length, start, request.prompt, blocks, request.sampling)
        if not request.forked:
            table.expect_chunk(slot, True)
            for sequence in sequences[1:]:
                table.reserve(sequence)
