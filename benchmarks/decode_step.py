"""What an iteration of the whole worker costs: real plans, the bundled model, sampling included.

    python benchmarks/decode_step.py [--quick] [--json] [--quantization none,int8,gguf] [--kv-cache-dtype auto]
        [--threads 1]

A step is `Runner.execute` of one plan. Every row has `context` tokens whose keys and values are taken as computed, and
computes `new` ones: a decode step one, of a prompt all. Greedy. Reported: median time by the clock and median processor
time of the calling thread (all of the work when --threads is 1), and computed tokens per second from the former.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Literal, cast

import numpy as np

from pagemill_shared.messages import IterationPlan, SequenceJoin, WorkerWelcome
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.settings import WorkerSettings
from pagemill_worker.load import load_worker
from pagemill_worker.runner import Runner

DECODES = ((1, 64), (8, 64), (32, 64), (32, 512))
"""(rows, context)"""
PROMPTS = ((1, 64), (4, 64), (1, 512))
"""(rows, tokens of each)"""


def joins(rows: int, context: int, new: int, more: int, block_size: int) -> tuple[SequenceJoin, ...]:
    """Rows with ``context`` computed tokens, ``new`` that are not, and blocks enough for ``more``."""
    blocks_each = -(-(context + new + more) // block_size)
    random = np.random.default_rng(1)
    # Blocks of a sequence lie anywhere in the pool, as they do after some time of serving.
    blocks = random.permutation(rows * blocks_each).astype(np.int32).reshape(rows, blocks_each) + 1
    return tuple(
        SequenceJoin(
            slot=slot,
            sequence=0,
            prompt_length=context + new,
            computed=context,
            token_ids=random.integers(100, 40_000, context + new).astype(np.int32),
            block_table=blocks[slot],
            sampling=SamplingParams(temperature=0.0),
        )
        for slot in range(rows)
    )


def decode_plans(rows: int, context: int, steps: int, block_size: int) -> Iterator[IterationPlan]:
    slots = np.arange(rows, dtype=np.int32)
    joined = joins(rows, context, 1, steps, block_size)
    for iteration in range(steps):
        yield IterationPlan(0, iteration + 1, joined=joined if iteration == 0 else (), decode_rows=slots)


def prompt_plans(rows: int, tokens: int, steps: int, block_size: int) -> Iterator[IterationPlan]:
    """The same prompts over and over: what is computed is written to the same blocks."""
    slots = np.arange(rows, dtype=np.int32)
    joined = joins(rows, 0, tokens, 0, block_size)
    chunks = np.array([(slot, 0, tokens, 1) for slot in range(rows)], np.int32)
    for iteration in range(steps):
        released = slots if iteration else slots[:0]
        yield IterationPlan(0, iteration + 1, released=released, joined=joined, prefill_chunks=chunks)


def measure(runner: Runner, rows: int, new: int, plans: Iterator[IterationPlan]) -> tuple[float, float]:
    """Median seconds of a step: by the clock, and of this thread's processor time."""
    runner.begin(WorkerWelcome(epoch=0, max_num_seqs=rows, max_num_batched_tokens=rows * new))
    wall, processor = [], []
    for plan in plans:
        clock, thread = time.perf_counter(), time.thread_time()
        runner.execute(plan)
        wall.append(time.perf_counter() - clock)
        processor.append(time.thread_time() - thread)
    return statistics.median(wall[2:]), statistics.median(processor[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--quantization", default="none,int8,gguf", help="comma-separated")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp16", "bf16", "int8", "fp8"])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    steps = 12 if arguments.quick else 60
    cases: list[dict[str, object]] = []
    for quantization in arguments.quantization.split(","):
        settings = WorkerSettings(
            quantization=cast(Literal["none", "int8", "gguf"], quantization),
            kv_cache_dtype=arguments.kv_cache_dtype,
            num_threads=arguments.threads,
            num_kv_blocks=2048,
            num_swap_blocks=0,
        )
        runner, hello = load_worker(settings, lambda text, done: None)
        runner.cache.pool.zero_()  # never written, all of it would be one page of zeros in the cache
        print(
            f"{hello.model}, {hello.dtype}, quantization {quantization}, KV cache {arguments.kv_cache_dtype}, "
            f"{hello.kernels}, {hello.device}"
        )
        print(f"{'rows':>5} {'context':>8} {'new':>5} {'clock ms':>9} {'cpu ms':>9} {'tokens/s':>9}")
        loads = [(rows, context, 1) for rows, context in DECODES] + [(rows, 0, tokens) for rows, tokens in PROMPTS]
        for rows, context, new in loads:
            size = runner.cache.block_size
            plans = decode_plans(rows, context, steps, size) if context else prompt_plans(rows, new, steps, size)
            wall, processor = measure(runner, rows, new, plans)
            cases.append(
                {
                    "quantization": quantization,
                    "kv_cache_dtype": arguments.kv_cache_dtype,
                    "kernels": hello.kernels,
                    "rows": rows,
                    "context": context,
                    "new": new,
                    "clock_ms": round(wall * 1e3, 2),
                    "cpu_ms": round(processor * 1e3, 2),
                    "tokens_per_s": round(rows * new / wall, 1),
                }
            )
            print(f"{rows:5} {context:8} {new:5} {wall * 1e3:9.2f} {processor * 1e3:9.2f} {rows * new / wall:9.1f}")
    if arguments.json:
        print(json.dumps({"benchmark": "decode_step", "threads": arguments.threads, "steps": steps, "cases": cases}))


if __name__ == "__main__":
    main()
