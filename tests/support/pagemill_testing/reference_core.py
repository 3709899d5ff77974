"""The planning policy once more, slow and obvious: plain lists and dicts, one sequence at a time, nothing kept that can
be counted anew. It is written from docs/scheduling.md and compared with the core plan by plan.

It knows one worker and one gateway, parallel samples, priorities, chunks, the prefix cache with its order of eviction,
swapping and recomputation with block trees and gates, and plans in flight. It leaves out beam search, several
workers, epochs, faults, ageing, the watermark, and costs (``preemption_mode`` is swap or recompute). A pool of fewer
than 64 blocks is assumed: the core evicts in batches from larger ones.
"""

from __future__ import annotations

from pagemill_testing.reference_rows import Block, Group, Name, Node, Plan, Row

SHORT_SHARE = 10


class ReferenceCore:
    def __init__(self, size: int, blocks: int, host: int, seats: int, budget: int, mode: str, caching: bool) -> None:
        self.size, self.blocks, self.seats, self.budget = size, blocks, seats, budget
        self.mode, self.caching = mode, caching
        self.groups: list[Group] = []
        self.names: dict[Name, Block] = {}
        self.evictable: list[Block] = []
        self.host_free, self.host_next = host, 0
        self.swapped_out = 0  # since the last plan

    # ---- what can be counted

    def active(self) -> list[Row]:
        rows = [row for group in self.groups for row in group.rows if row.table is not None]
        return sorted(rows, key=lambda row: (*row.request.rank, row.index))

    def references(self, block: Block) -> int:
        return sum(block in (row.table or []) for row in self.active())

    def used(self) -> int:
        return len({block for row in self.active() for block in row.table or []})

    def free(self) -> int:
        return self.blocks - self.used()

    def waiting(self) -> list[Group]:
        return sorted((group for group in self.groups if not group.running), key=lambda group: group.rank)

    def need(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-tokens // self.size)

    # ---- blocks

    def allocate(self, count: int, keep: list[Block]) -> list[Block]:
        """``keep`` are about to be used, though no table holds them yet."""
        unused = self.blocks - self.used() - len(self.evictable) - sum(self.references(b) == 0 for b in keep)
        for _ in range(count - unused):
            block = self.evictable.pop(0)
            assert block.name is not None
            del self.names[block.name]
        return [Block() for _ in range(count)]

    def release(self, row: Row) -> None:
        table, row.table = row.table or [], None
        for block in reversed(table):
            if block.name is not None and not self.references(block):
                self.evictable.append(block)

    def take(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block in self.evictable:
                self.evictable.remove(block)

    def name(self, row: Row) -> None:
        if not self.caching or row.table is None:
            return
        for i in range(row.named, min(len(row.tokens), row.computed) // self.size):
            name = row.node, tuple(row.tokens[i * self.size : (i + 1) * self.size])
            if name not in self.names:
                self.names[name] = row.table[i]
                row.table[i].name, row.table[i].node = name, Node()
            row.node = self.names[name].node
            row.named = i + 1

    def cached(self, row: Row) -> list[Block]:
        found: list[Block] = []
        node: Node | str = row.request.salt
        for i in range((len(row.tokens) - 1) // self.size if self.caching else 0):
            block = self.names.get((node, tuple(row.tokens[i * self.size : (i + 1) * self.size])))
            if block is None:
                break
            found.append(block)
            node = block.node
        return found

    # ---- events

    def submit(self, group: Group) -> None:
        group.rows = [Row(group, index, list(group.prompt)) for index in range(group.n)]
        group.forked = group.n == 1
        self.groups.append(group)

    def abort(self, group: Group) -> None:
        for row in group.rows:
            if row.table is not None:
                self.release(row)
        self.host_free += len({block for row in group.left() for block in row.parked})
        self.groups.remove(group)

    def result(self, rows: list[Row], tokens: list[int]) -> None:
        ended = []
        orphans = [(row, token) for row, token in zip(rows, tokens, strict=True) if row.in_flight and row.table is None]
        others = [(row, token) for row, token in zip(rows, tokens, strict=True) if row.table is not None]
        for row, token in orphans:
            row.in_flight -= 1
            if not row.finished and row.request in self.groups and self.append(row, token):
                self.end(row)
        for row, token in others:
            if row.pending:
                row.pending -= 1
                if self.append(row, token):
                    ended.append(row)
                self.name(row)
        for row in ended:
            self.end(row)

    def append(self, row: Row, token: int) -> bool:
        """Whether that ends the sequence."""
        row.tokens.append(token)
        return token in row.request.ends or len(row.tokens) - len(row.request.prompt) == row.request.max_tokens

    def end(self, row: Row) -> None:
        """``row`` has finished."""
        group = row.request
        row.finished = True
        if row.table is not None:
            self.release(row)
        if group.swapped:
            kept = {block for other in group.left() for block in other.parked}
            self.host_free += len(set(row.parked) - kept)
        if not group.left():
            self.groups.remove(group)
        elif group.running and any(other.gated() and other.gate and other.gate[0] is row for other in group.left()):
            self.preempt(group)

    # ---- planning

    def plan(self) -> Plan | None:
        plan = Plan()
        self.make_way()
        budget = self.budget - self.decode(plan)
        prefilling = [row for row in self.active() if self.prefills(row)]
        if prefilling:
            budget = self.start_newcomers(plan, budget, self.budget // SHORT_SHARE)
        for row in prefilling:
            budget = self.chunk(plan, row, budget)
        self.start_newcomers(plan, budget, None)
        if not (plan.rows or plan.chunks or plan.joins):
            return None
        plan.swapped_out, self.swapped_out = self.swapped_out, 0
        self.host_free, self.host_next = self.host_free + self.host_next, 0
        return plan

    def prefills(self, row: Row) -> bool:
        left = len(row.tokens) + row.pending - row.computed
        return left > 1 or (not row.request.forked and left > 0 and row is row.request.left()[0])

    def decode(self, plan: Plan) -> int:
        while True:
            ready = [row for row in self.active() if row.table and not self.prefills(row) and self.decodes(row)]
            growing = [row for row in ready if row.table is not None and row.computed == len(row.table) * self.size]
            writers = [row.table[-1] for row in ready if row.table is not None and row not in growing]
            copies = sum(min(writers.count(b), self.references(b) - 1) for b in set(writers))
            if len(growing) + copies <= self.free():
                break
            self.preempt(self.active()[-1].request)
        for row in growing:
            assert row.table is not None
            plan.grown.add((row.request.handle, row.index, len(row.table)))
            row.table += self.allocate(1, [])
        for row in ready:
            assert row.table is not None
            if row not in growing and self.references(row.table[-1]) > 1:
                row.table[-1:] = self.allocate(1, [])
                plan.copies += 1
        for row in ready:
            row.computed += 1
            row.pending += 1
            plan.rows.add((row.request.handle, row.index))
        return len(ready)

    def decodes(self, row: Row) -> bool:
        known, limit = len(row.tokens) + row.pending, len(row.request.prompt) + row.request.max_tokens
        return known - row.computed == 1 and known < limit and not row.gated()

    def chunk(self, plan: Plan, row: Row, budget: int) -> int:
        count = min(len(row.tokens) - row.computed, budget)
        if count <= 0 or row.gated():
            return budget
        samplers: list[Row] = []
        start, row.computed = row.computed, row.computed + count
        self.name(row)
        if row.computed == len(row.tokens):
            samplers = [row]
            if not row.request.forked:
                for other in row.request.left()[1:]:
                    other.table, other.computed = list(row.table or []), row.computed
                    other.named, other.node = row.named, row.node
                    samplers.append(other)
                row.request.forked = True
            for sampler in samplers:
                sampler.pending += 1
        plan.chunks.append((row.request.handle, row.index, start, count, len(samplers)))
        plan.sampled += samplers
        return budget - count

    def preempt(self, group: Group) -> None:
        rows = [row for row in group.rows if row.table is not None]
        filled = [row for row in rows if row.computed > 0]
        held = {row: (row.table or [])[: self.need(row.computed)] for row in filled}
        blocks = {block for table in held.values() for block in table}
        swap = self.mode == "swap" and bool(filled) and len(blocks) <= self.host_free
        if swap and not any(row.gated() for row in filled):
            group.swapped = True
            self.host_free -= len(blocks)
            self.swapped_out += len(blocks)
            for row in filled:
                row.parked = held[row]
        for row in rows:
            self.release(row)
            row.in_flight, row.pending, row.gate = row.pending, 0, None
            if not group.swapped:
                row.computed = 0
        group.running = False

    # ---- starting

    def starters(self, group: Group) -> list[Row]:
        return group.left() if group.forked else group.left()[:1]

    def trees(self, group: Group) -> list[list[object]]:
        """Keys of the leading blocks of each starter; equal keys are one block."""
        rows = self.starters(group)
        if group.swapped:
            return [list(row.parked) for row in rows]
        if len(rows) == 1:
            return [[]]
        full = [(len(row.tokens) - 1) // self.size for row in rows]
        return [[tuple(r.tokens[: (i + 1) * self.size]) for i in range(f)] for r, f in zip(rows, full, strict=True)]

    def demand(self, group: Group) -> tuple[int, list[Block]]:
        rows, trees = self.starters(group), self.trees(group)
        shared = sum(len(tree) for tree in trees) - len({key for tree in trees for key in tree})
        cached = self.cached(rows[0])
        in_use = sum(self.references(block) > 0 for block in cached)
        forks = 0 if group.forked else group.n - 1
        return sum(self.need(len(row.tokens)) for row in rows) - shared - in_use + forks, cached

    def fits(self, group: Group) -> bool:
        return len(self.active()) + len(group.left()) <= self.seats and self.demand(group)[0] <= self.free()

    def start_newcomers(self, plan: Plan, budget: int, share: int | None) -> int:
        reserved = 0 if share is None else max(budget - share, 0)
        for group in self.waiting():
            if not budget or any(row.in_flight for row in group.rows) or not self.fits(group):
                break
            work = sum(len(row.tokens) for row in self.starters(group)) - len(self.demand(group)[1]) * self.size
            if share is not None and work > budget - reserved:
                break
            budget = self.start(plan, group, budget)
        return budget

    def start(self, plan: Plan, group: Group, budget: int) -> int:
        stands_for: dict[object, Block] = {}
        fills: dict[Block, Row] = {}
        joined = self.starters(group)
        for row, tree in zip(joined, self.trees(group), strict=True):
            self.start_row(plan, row, tree, stands_for, fills)
        for row in group.left():
            row.table = row.table or []  # seats of those that fork later
        if group.swapped:
            self.host_next += len({block for row in group.left() for block in row.parked})
        for row in group.rows:
            row.parked = []
        group.running, group.swapped = True, False
        for row in joined:
            resumed = len(row.tokens) > len(group.prompt)
            if budget and len(row.tokens) - row.computed > resumed:
                budget = self.chunk(plan, row, budget)
        return budget

    def start_row(
        self, plan: Plan, row: Row, tree: list[object], stands_for: dict[object, Block], fills: dict[Block, Row]
    ) -> None:
        cached, swapped = self.cached(row), row.request.swapped
        table: list[Block | None] = [None] * self.need(len(row.tokens))
        lead = 0
        for i in range(max(len(tree), len(cached))):
            block = cached[i] if i < len(cached) else stands_for.get(tree[i])
            if block is not None and (swapped or lead == i):
                table[i] = block
                lead += lead == i
                if block in fills:
                    row.gate = (fills[block], (i + 1) * self.size)
        known = [block for block in table if block is not None]
        self.take(known)
        fresh = iter(self.allocate(table.count(None), known))
        blocks = [block or next(fresh) for block in table]
        plan.swapped_in += sum(swapped and old is None and i < len(tree) for i, old in enumerate(table))
        row.table = blocks
        row.named, row.node = len(cached), cached[-1].node if cached else row.request.salt
        stands_for.update(zip(tree, blocks, strict=False))
        if swapped:
            row.computed = max(row.computed, len(cached) * self.size)
        else:
            row.computed = min(lead * self.size, len(row.tokens) - 1)
            fills.update((block, row) for block in blocks[lead:])
        plan.joins.append((row.request.handle, row.index, row.computed, len(blocks)))

    def make_way(self) -> None:
        """Preempt what is less urgent than the first in the queue, if that lets it start."""
        if not self.waiting():
            return
        first = self.waiting()[0]
        if any(row.in_flight for row in first.rows) or self.fits(first):
            return
        running = [group for group in self.groups if group.running and group.priority > first.priority]
        victims = sorted(running, key=lambda group: group.rank, reverse=True)
        for count in range(1, len(victims) + 1):
            gone = [row for group in victims[:count] for row in group.rows if row.table is not None]
            need, cached = self.demand(first)
            tables = [block for row in gone for block in row.table or []]
            freed = {b for b in tables if self.references(b) == tables.count(b)} - set(cached)
            if need <= self.free() + len(freed) and len(self.active()) - len(gone) + len(first.left()) <= self.seats:
                for victim in victims[:count]:
                    self.preempt(victim)
                return
