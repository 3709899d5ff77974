"""Compiled CPU kernels against torch's, at the sizes of SmolLM2-135M: 9 query heads on 3 key heads of 64; 30 layers.

Both take turns within one run, and the fastest of several turns counts. On one thread it is the thread's own CPU time
that counts, so that other programs on the machine disturb little.

    python benchmarks/kernels_cpu.py [--quick] [--json] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch.nn import functional

from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_kernels.interface import AttentionBatch, AttentionSpec, Kernels, Linear
from pagemill_kernels.linear import LinearFactory
from pagemill_kernels.reference import TorchKernels
from pagemill_kernels.select import select_kernels
from pagemill_shared.settings import default_cache_dir

CPU = torch.device("cpu")
LAYERS, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 30, 3, 3, 64, 16
HIDDEN, INTERMEDIATE = 576, 1536
BEYOND_CACHES = 64 << 20
"""Bytes of weights that a product goes through before it meets the first again."""


@dataclass(frozen=True)
class Row:
    """One line of the table: microseconds per call, and what the faster one moves or computes."""

    kernel: str
    case: str
    torch_us: float
    own_us: float
    ratio: float
    rate: str


class Clock:
    def __init__(self, threads: int, turns: int) -> None:
        self._now = time.thread_time if threads == 1 else time.perf_counter
        self._turns = turns

    def race(self, plain: Callable[[], object], own: Callable[[], object], calls: int) -> tuple[float, float]:
        """Seconds per call of both, where each turn makes ``calls`` calls."""
        best = [float("inf")] * 2
        for _ in range(self._turns + 1):  # the first warms up, and is no faster
            for index, work in enumerate((plain, own)):
                begun = self._now()
                work()
                best[index] = min(best[index], (self._now() - begun) / calls)
        return best[0], best[1]


def compare(kernel: str, case: str, seconds: tuple[float, float], rate: str) -> Row:
    plain, own = seconds
    row = Row(kernel, case, round(plain * 1e6, 1), round(own * 1e6, 1), round(plain / own, 2), rate)
    print(
        f"{row.kernel:14} {row.case:32} {row.torch_us:10.1f} {row.own_us:10.1f} {row.ratio:7.2f}x   {row.rate}",
        flush=True,
    )
    return row


def attention(clock: Clock, own: CpuKernels, rows: int, context: int, query: int) -> list[Row]:
    width = -(-context // BLOCK_SIZE)
    shape = (rows * width + 1, LAYERS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    cache = torch.from_numpy(np.zeros(shape, np.float32)).normal_()  # as the worker allocates it
    tables = (torch.randperm(rows * width) + 1).view(rows, width)
    positions = torch.arange(context - query, context)
    batch = AttentionBatch(
        query_starts=torch.arange(rows + 1) * query,
        context_lens=torch.full((rows,), context),
        block_tables=tables,
        slot_mapping=(tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).flatten(),
        num_decodes=rows if query == 1 else 0,
    )
    heads = KV_HEADS * GROUP
    qkv = torch.randn(rows * query, heads + 2 * KV_HEADS, HEAD_DIM)
    rotary = torch.randn(rows * query, 1, HEAD_DIM), torch.randn(rows * query, 1, HEAD_DIM)
    spec = AttentionSpec(HEAD_DIM**-0.5)
    sets: tuple[Kernels, Kernels] = (TorchKernels(), own)
    steps = [kernels.prepare(batch, cache) for kernels in sets]

    def attend(index: int) -> Callable[[], None]:
        def work() -> None:
            for layer in range(LAYERS):
                sets[index].attention(qkv[:, :heads], cache, steps[index], layer, spec)

        return work

    def write(index: int) -> Callable[[], None]:
        def work() -> None:
            rows = qkv.clone()
            for layer in range(LAYERS):
                sets[index].rotate_and_write(rows, rotary, cache, steps[index], layer)

        return work

    case = f"{rows} rows, {context} context" + (f", {query} new" if query > 1 else "")
    seconds = clock.race(attend(0), attend(1), LAYERS)
    if query == 1:
        rate = f"{rows * context * KV_HEADS * HEAD_DIM * 8 / seconds[1] / 1e9:.1f} GB/s"
    else:
        products = rows * query * (context - query / 2) * heads * HEAD_DIM * 4
        rate = f"{products / seconds[1] / 1e9:.0f} GFLOP/s"
    result = [compare("attention", case, seconds, rate)]
    if context in (64, 512) and query != 256:
        result.append(compare("rotate_write", f"{rows * query} tokens", clock.race(write(0), write(1), LAYERS), ""))
    return result


def products(clock: Clock, own: CpuKernels, inputs: int, outputs: int, rows: list[int]) -> list[Row]:
    copies = max(1, BEYOND_CACHES // (inputs * outputs * 4))
    weights = [torch.randn(outputs, inputs) for _ in range(copies)]
    makers = LinearFactory(torch.float32, CPU), LinearFactory(torch.float32, CPU, own)
    linears: list[list[Linear]] = [[make(weight) for weight in weights] for make in makers]
    result = []
    for count in rows:
        x = torch.randn(count, inputs)

        def work(index: int, x: torch.Tensor = x) -> Callable[[], None]:
            return lambda: [linear(x) for linear in linears[index]] and None

        seconds = clock.race(work(0), work(1), copies)
        rate = (
            f"{2 * count * inputs * outputs / seconds[1] / 1e9:.0f} GFLOP/s, "
            f"{inputs * outputs * 4 / seconds[1] / 1e9:.0f} GB/s"
        )
        result.append(
            compare(f"linear {makers[0].name}", f"[{count}, {inputs}] x [{inputs}, {outputs}]", seconds, rate)
        )
    return result


def small(clock: Clock, own: CpuKernels, rows: int) -> list[Row]:
    x, weight, gate_up = torch.randn(rows, HIDDEN), torch.randn(HIDDEN), torch.randn(rows, 2 * INTERMEDIATE)

    def plain_silu() -> None:
        gate, up = gate_up.chunk(2, -1)
        functional.silu(gate).mul_(up)

    def repeat(work: Callable[[], object]) -> Callable[[], None]:
        return lambda: [work() for _ in range(200)] and None

    plain_norm = repeat(lambda: functional.rms_norm(x, (HIDDEN,), weight, 1e-5))
    own_norm = repeat(lambda: own.rms_norm(x, weight, 1e-5))
    return [
        compare("rms_norm", f"{rows} rows", clock.race(plain_norm, own_norm, 200), ""),
        compare(
            "silu_mul", f"{rows} rows", clock.race(repeat(plain_silu), repeat(lambda: own.silu_mul(gate_up)), 200), ""
        ),
    ]


def copies(clock: Clock, own: CpuKernels, count: int) -> list[Row]:
    shape = (2 * count + 1, LAYERS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    pool = torch.from_numpy(np.zeros(shape, np.float32)).normal_()
    pairs = torch.stack((torch.arange(count), torch.arange(count) + count), 1)
    plain = TorchKernels()
    seconds = clock.race(lambda: plain.copy_blocks(pool, pool, pairs), lambda: own.copy_blocks(pool, pool, pairs), 1)
    moved = count * pool[0].numel() * 4
    return [compare("copy_blocks", f"{count} blocks", seconds, f"{moved / seconds[1] / 1e9:.1f} GB/s")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and turns")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    own = select_kernels(CPU, default_cache_dir(), print)
    if not isinstance(own, CpuKernels):
        print("there are no compiled kernels to compare")
        return 1
    print(f"{own.name}, {arguments.threads} threads\n{'kernel':14} {'case':32} {'torch us':>10} {'own us':>10}   ratio")
    clock = Clock(arguments.threads, 2 if arguments.quick else 5)
    rows, contexts = ([1, 32], [64, 512]) if arguments.quick else ([1, 8, 32], [64, 512, 2048])
    result: list[Row] = []
    with torch.inference_mode():
        for count in rows:
            for context in contexts:
                result += attention(clock, own, count, context, 1)
        result += attention(clock, own, 1, 512, 512)
        if not arguments.quick:
            result += attention(clock, own, 1, 2048, 256)
        for count in rows:
            result += small(clock, own, count)
        result += copies(clock, own, 8)
        shapes = [(HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)]
        if not arguments.quick:
            shapes += [(HIDDEN, 960), (HIDDEN, HIDDEN), (HIDDEN, 49152)]
        for inputs, outputs in shapes:
            result += products(clock, own, inputs, outputs, [*rows, 128] if arguments.quick else [*rows, 128, 512])
    if arguments.json:
        print(json.dumps({"kernels": own.name, "threads": arguments.threads, "rows": [asdict(row) for row in result]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
