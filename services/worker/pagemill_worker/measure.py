"""Warm-up of a runner, and the rates that the scheduler plans with: measured by plans, as real work is."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from pagemill_shared.messages import IterationPlan, SequenceJoin, WorkerWelcome
from pagemill_shared.sampling import SamplingParams
from pagemill_worker.runner import Runner

PREFILL_TOKENS = 128
DECODE_ROWS = 32
SWAP_BLOCKS = 16


def decode_seconds(runner: Runner, steps: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of ``steps`` decode iterations of a few rows."""
    rows = min(DECODE_ROWS, runner.cache.num_blocks)
    runner.begin(WorkerWelcome(epoch=0, max_num_seqs=rows, max_num_batched_tokens=PREFILL_TOKENS))
    joins = tuple(_join(slot, 1, (slot + 1,)) for slot in range(rows))
    slots = np.arange(rows, dtype=np.int32)
    seconds = []
    for iteration in range(min(steps, runner.cache.block_size)):
        plan = IterationPlan(0, iteration + 1, joined=joins if iteration == 0 else (), decode_rows=slots)
        begun = clock()
        runner.execute(plan)
        seconds.append(clock() - begun)
    return min(seconds)


def prefill_rate(runner: Runner, clock: Callable[[], float] = time.perf_counter) -> float:
    """Prompt tokens per second of one prefill chunk."""
    block_size = runner.cache.block_size
    tokens = min(PREFILL_TOKENS, runner.cache.num_blocks * block_size, runner.max_model_len)
    runner.begin(WorkerWelcome(epoch=0, max_num_seqs=1, max_num_batched_tokens=PREFILL_TOKENS))
    join = _join(0, tokens, tuple(range(1, 1 + -(-tokens // block_size))))
    chunk = np.array([[0, 0, tokens, 1]], np.int32)
    begun = clock()
    runner.execute(IterationPlan(0, 1, joined=(join,), prefill_chunks=chunk))
    return tokens / max(clock() - begun, 1e-9)


def swap_rate(runner: Runner, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second between the two pools, out and in counted once each; 0 without a host pool."""
    cache = runner.cache
    count = min(SWAP_BLOCKS, cache.num_blocks, cache.num_swap_blocks)
    if not count:
        return 0.0
    runner.begin(WorkerWelcome(epoch=0, max_num_seqs=1, max_num_batched_tokens=PREFILL_TOKENS))
    host = np.arange(count, dtype=np.int32)
    out, back = np.stack((host + 1, host), 1), np.stack((host, host + 1), 1)
    best = 0.0
    for number in range(3):  # the first touches the memory
        plans = IterationPlan(0, 2 * number + 1, swap_out=out), IterationPlan(0, 2 * number + 2, swap_in=back)
        runner.synchronize()
        begun = clock()
        for plan in plans:
            runner.execute(plan)
        runner.synchronize()
        best = max(best, 2 * count * cache.block_bytes / max(clock() - begun, 1e-9))
    return best


def _join(slot: int, tokens: int, blocks: tuple[int, ...]) -> SequenceJoin:
    return SequenceJoin(
        slot=slot,
        sequence=0,
        prompt_length=tokens,
        computed=0,
        token_ids=np.zeros(tokens, np.int32),
        block_table=np.array(blocks, np.int32),
        sampling=SamplingParams(temperature=0.0),
    )
