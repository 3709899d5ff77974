"""Brings a waiting request onto a worker: new ones, and preempted ones with their block tree rebuilt (paper §4.5)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagemill_scheduler.prefix_names import NO_KEY, NO_SALT
from pagemill_scheduler.request import Request, Sequence, Status
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState
from pagemill_shared.messages import SequenceJoin
from pagemill_shared.schema import Int32Array

_NO_BLOCK = 0  # physical block 0 is never handed out


@dataclass(slots=True)
class Arrival:
    """What a plan must tell the worker about a request that starts.

    Attributes:
        swap_in: (host block, device block).
    """

    joined: list[SequenceJoin] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


def starters(request: Request) -> list[Sequence]:
    """The sequences that start with tokens of their own; the others fork from the first once its prompt is computed."""
    unfinished = request.unfinished
    return unfinished if request.forked else unfinished[:1]


class Demand:
    """What starting a request on a worker takes.

    Attributes:
        blocks: free blocks, with one more for each fork to come.
        cached: leading blocks of its first sequence that the prefix cache holds; node: that of the last, or the root.
        key: of the block after them (``PrefixNames.find``).
    """

    def __init__(self, blocks: int, cached: list[int], node: int, key: int) -> None:
        self.blocks, self.cached, self.node, self.key = blocks, cached, node, key


def demand(state: State, worker: WorkerState, request: Request) -> Demand:
    """What ``request`` would take on ``worker`` as things stand."""
    sequences = request.sequences[:1] if request.is_fresh else starters(request)
    need = 0
    for sequence in sequences:
        need += worker.blocks_for(len(sequence.tokens))
    if len(sequences) > 1 or request.swapped_to:
        trees = block_trees(worker, request)
        need -= sum(len(tree) for tree in trees) - len({key for tree in trees for key in tree})
    cached, node, key = _cached(state, worker, sequences[0])
    if cached:
        # Blocks in use cost nothing to share; an evictable one is taken from the free ones like a new one.
        need -= int(np.count_nonzero(worker.pool.refs[cached]))
    return Demand(need + (0 if request.forked else request.width - 1), cached, node, key)


def block_trees(worker: WorkerState, request: Request) -> list[list[int]]:
    """For each starter of a preempted request, keys of its leading blocks; equal keys are one block.

    Of a swapped request these are the host blocks. A request that is recomputed shares every full block that begins
    with the same tokens, whatever it shared before: so it never takes more blocks than ``WorkerState.most_blocks``.
    Its part-filled blocks are not shared, since they are written to at once; nor are blocks that hold a last token,
    which each sequence computes for its own logits.
    """
    sequences = starters(request)
    if request.swapped_to:
        return [sequence.parked.blocks if sequence.parked else [] for sequence in sequences]
    if len(sequences) == 1:
        return [[]]
    width = 4 * worker.block_size
    keys: dict[tuple[int, bytes], int] = {}
    trees: list[list[int]] = []
    for sequence in sequences:
        data = sequence.tokens[: (len(sequence.tokens) - 1) // worker.block_size * worker.block_size].tobytes()
        tree: list[int] = []
        key = 0
        for start in range(0, len(data), width):
            key = keys.setdefault((key, data[start : start + width]), len(keys) + 1)
            tree.append(key)
        trees.append(tree)
    return trees


def _cached(state: State, worker: WorkerState, sequence: Sequence) -> tuple[list[int], int, int]:
    """The leading blocks of a waiting sequence that the worker's prefix cache holds, the node behind them, and the key
    of the next.

    At least one token is left to compute, or there would be no logits to sample from; and all those whose positions
    the request wants to hear of.
    """
    if not state.config.prefix_caching:
        return [], NO_SALT, NO_KEY
    size, names = worker.block_size, worker.pool.names
    request, spared = sequence.request, len(sequence.tokens) - 1
    if not request.plain and request.sampling.needs_every_position and request.reports_more:
        spared = min(spared, request.reported)
    count = spared // size
    return names.find(names.root(request.cache_salt), sequence.tokens[: count * size])


def start(state: State, worker: WorkerState, request: Request, taken: Demand, now: float) -> Arrival:
    """Move a waiting request onto ``worker``, with blocks for all of its known tokens.

    Every sequence gets its blocks at once: were they handed out chunk by chunk, a long prompt could be thrown out
    half-way, over and over. Sequences of a preempted group share the blocks that they shared before: the first of
    them computes (or swaps in) such a block, the others wait at a gate until it has.

    Args:
        taken: ``demand`` of this request, made since the worker's pool last changed.
    """
    state.queue.remove(request)
    request.move(Status.RUNNING)
    request.worker = worker.identity
    request.waits_for = ""
    worker.take_seats(request, request.seats_needed)
    swapped = bool(request.swapped_to)
    fresh = request.started_at is None
    arrival = Arrival()
    sequences = starters(request)
    if len(sequences) == 1 and not swapped:
        _start_alone(state, worker, sequences[0], taken, arrival)
    else:
        trees = block_trees(worker, request)
        now_at: dict[int, int] = {}  # a key of a block tree -> the device block that stands for it
        filled_by: dict[int, int] = {}  # a device block -> the slot that fills it
        for number, sequence in enumerate(sequences):
            cached, node = taken.cached, taken.node
            if number:
                cached, node, _ = _cached(state, worker, sequence)
            _start_together(state, worker, sequence, trees[number], cached, node, now_at, filled_by, arrival)
    if request.sampling.grammar:
        for join in arrival.joined:
            worker.table.await_grammar(join.slot, worker.outgoing.sent + 1, now + state.config.grammar_timeout)
    if fresh:
        request.started_at = now
        state.counters.prompt_tokens += len(request.prompt)
        state.counters.prefix_queries += len(request.prompt)
        [join] = arrival.joined
        request.cached_tokens = join.computed
        worker.table.cached[join.slot] = join.computed
        state.counters.prefix_hits += join.computed
    forks = not request.forked and request.beams is None
    if forks or request.reports_more:
        worker.table.expect_chunk(request.unfinished[0].slot, True)
    if forks:
        for sequence in request.unfinished[1:]:
            worker.table.reserve(sequence)
            worker.table.cached[sequence.slot] = request.cached_tokens
    if swapped:
        host = {block for s in request.unfinished if s.parked for block in s.parked.blocks}
        # They are read by this plan's swap-in, so nothing may be swapped out to them before the next plan.
        worker.host.release(sorted(host), after_plan=True)
        moved = len(arrival.swap_in) * worker.hello.block_bytes
        request.swapped_bytes += moved
        state.counters.swapped_in_blocks += len(arrival.swap_in)
        request.swapped_to = ""
    for sequence in request.unfinished:
        sequence.parked = None
    return arrival


def _start_alone(state: State, worker: WorkerState, sequence: Sequence, taken: Demand, arrival: Arrival) -> None:
    """Start the only sequence of a request that was not swapped out: what the cache holds, then new blocks."""
    pool, length, lead = worker.pool, len(sequence.tokens), len(taken.cached)
    cached = np.array(taken.cached, np.int32)
    if lead:
        pool.share(cached)  # first, so that nothing of it is evicted by what is allocated after
    fresh = pool.allocate(worker.blocks_for(length) - lead)
    blocks = np.concatenate([cached, fresh]) if lead else fresh
    ready = min(lead * worker.block_size, length - 1)
    if sequence.parked is not None:
        _count_recomputed(state, sequence, sequence.parked.computed - ready)
    _join(worker, sequence, blocks, ready, lead, taken.node, arrival)


def _start_together(
    state: State,
    worker: WorkerState,
    sequence: Sequence,
    tree: list[int],
    cached: list[int],
    node: int,
    now_at: dict[int, int],
    filled_by: dict[int, int],
    arrival: Arrival,
) -> None:
    """Start one of the sequences of a group that rebuilds its block tree, or was swapped out."""
    pool, size = worker.pool, worker.block_size
    length = len(sequence.tokens)
    total = worker.blocks_for(length)
    held = sequence.parked.computed if sequence.parked else 0
    swapped = bool(sequence.request.swapped_to)
    # First share what is there, so that nothing of it is evicted by what is allocated after.
    lead = 0  # leading blocks that need no work of this sequence
    gate, gate_at = -1, 0
    blocks = [_NO_BLOCK] * total
    for i in range(max(len(tree), len(cached))):
        # What is cached is full and computed, which a sibling's block need not be.
        block = cached[i] if i < len(cached) else now_at.get(tree[i], _NO_BLOCK)
        if block != _NO_BLOCK and (swapped or lead == i):
            blocks[i] = block
            lead += lead == i
            if block in filled_by:
                gate, gate_at = filled_by[block], (i + 1) * size
    shared = [block for block in blocks if block != _NO_BLOCK]
    if shared:
        pool.share(np.array(shared, np.int32))
    missing = [i for i, block in enumerate(blocks) if block == _NO_BLOCK]
    for i, block in zip(missing, pool.allocate(len(missing)).tolist(), strict=True):
        blocks[i] = block
        if swapped and i < len(tree):
            arrival.swap_in.append((tree[i], block))
    now_at.update(zip(tree, blocks, strict=False))
    ready = max(held, len(cached) * size) if swapped else min(lead * size, length - 1)
    if not swapped:
        _count_recomputed(state, sequence, held - ready)
    slot = _join(worker, sequence, np.array(blocks, np.int32), ready, len(cached), node, arrival)
    if not swapped:
        for block in blocks[lead:]:
            filled_by[block] = slot
        if gate >= 0:
            worker.table.close_gate(slot, gate, gate_at)


def _count_recomputed(state: State, sequence: Sequence, tokens: int) -> None:
    state.counters.recomputed_tokens += max(tokens, 0)
    sequence.request.recomputed_tokens += max(tokens, 0)


def _join(
    worker: WorkerState,
    sequence: Sequence,
    blocks: Int32Array,
    computed: int,
    named: int,
    node: int,
    arrival: Arrival,
) -> int:
    """Give the sequence a slot and tell the worker; the slot. Its ``named`` leading blocks end at ``node``."""
    table, request = worker.table, sequence.request
    slot = table.join(sequence, blocks, computed, named, node)
    prompt_length, tokens = len(request.prompt), sequence.tokens
    arrival.joined.append(SequenceJoin(slot, sequence.index, prompt_length, computed, tokens, blocks, request.sampling))
    return slot
