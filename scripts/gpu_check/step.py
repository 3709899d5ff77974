"""Decode step of a whole model with random weights, against the time in which its bytes can be read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from gpu_check.shapes import DTYPE, LLAMA_1B, LLAMA_8B, RandomWeights, Shape
from gpu_check.table import Row
from gpu_check.timing import milliseconds
from pagemill_kernels.gpu.kernels import TritonKernels
from pagemill_shared.messages import IterationPlan, SequenceJoin, WorkerWelcome
from pagemill_shared.sampling import SamplingParams
from pagemill_worker.batch import build_batch
from pagemill_worker.cache import KVCache
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.models.architectures import ARCHITECTURES
from pagemill_worker.models.decoder import DecoderModel
from pagemill_worker.runner import Runner

BLOCK_SIZE = 16
CASES = ((LLAMA_8B, 1, 1024), (LLAMA_8B, 64, 1024), (LLAMA_1B, 1, 1024), (LLAMA_1B, 64, 1024))
AIM = 0.65


def make_runner(shape: Shape, batch: int, context: int, steps: int, device: torch.device, kernels: Any) -> Runner:
    """A runner whose pool holds ``batch`` sequences of ``context`` tokens and ``steps`` more."""
    longest = context + steps + 1
    weights = cast(Any, RandomWeights(shape, device))
    model = DecoderModel(ARCHITECTURES["LlamaForCausalLM"](shape.config), weights, longest, DTYPE, device)
    cache = KVCache(model.cache, BLOCK_SIZE, batch * -(-longest // BLOCK_SIZE), 0, DTYPE, device)
    cache.pool.normal_()
    no_grammars = GrammarCompiler(Path(), model.vocab_size, [])
    return Runner(model, cache, kernels, longest, device, no_grammars)


def joins(vocab_size: int, batch: int, context: int, steps: int) -> tuple[SequenceJoin, ...]:
    """Sequences whose every token but the last is in the cache, with blocks for all steps to come."""
    width = -(-(context + steps + 1) // BLOCK_SIZE)
    generator = np.random.default_rng(0)
    blocks = (generator.permutation(batch * width) + 1).astype(np.int32).reshape(batch, width)
    return tuple(
        SequenceJoin(
            slot=slot,
            sequence=0,
            prompt_length=context,
            computed=context - 1,
            token_ids=generator.integers(0, vocab_size, context).astype(np.int32),
            block_table=blocks[slot],
            sampling=SamplingParams(temperature=0.0),
        )
        for slot in range(batch)
    )


def run_steps(runner: Runner, batch: int, context: int, steps: int) -> float:
    """Median seconds of a decode step as the runner does it, from plan to sampled ids."""
    runner.begin(WorkerWelcome(epoch=0, max_num_seqs=batch, max_num_batched_tokens=batch))
    rows = np.arange(batch, dtype=np.int32)
    seconds = []
    for number in range(steps):
        joined = joins(runner.model.vocab_size, batch, context, steps) if number == 0 else ()
        begun = time.perf_counter()
        runner.execute(IterationPlan(0, number + 1, joined=joined, decode_rows=rows))
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[steps // 3 :])


@torch.inference_mode()
def replayed(runner: Runner, batch: int) -> float:
    """Median seconds of the forward pass up to the logits as one CUDA graph: the kernels with nothing between them."""
    assert runner._rows is not None
    plan = IterationPlan(0, 1, decode_rows=np.arange(batch, dtype=np.int32))
    made = build_batch(plan, runner._rows, BLOCK_SIZE, runner.max_model_len)
    assert made is not None
    device = runner.cache.pool.device
    step = runner.kernels.prepare(made.attention, runner.cache.pool)
    token_ids, positions = torch.from_numpy(made.token_ids).to(device), torch.from_numpy(made.positions).to(device)

    def forward() -> torch.Tensor:
        hidden = runner.model.forward(token_ids, positions, runner.cache.pool, runner.kernels, step)
        return runner.model.logits(hidden)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and uploads what the step needs
        for _ in range(2):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return milliseconds(lambda _: graph.replay(), 20) / 1e3


def measure(device: torch.device, bandwidth: float, quick: bool) -> Iterator[Row]:
    steps = 24
    for shape, batch, context in CASES[2:] if quick else CASES:
        runner = make_runner(shape, batch, context, steps, device, TritonKernels.on(device))
        case = f"{shape.name}, {batch} x {context}"
        # A copy reads and writes; what only reads is bound by the same total.
        floor = shape.step_bytes(batch, context) / bandwidth
        eager = run_steps(runner, batch, context, steps)
        graph = replayed(runner, batch)
        yield Row("decode step, runner", case, eager * 1e3, "ms", floor / eager)
        yield Row("forward pass, graph replay", case, graph * 1e3, "ms", floor / graph, AIM if batch == 64 else None)
        note = "the runner captures no graphs yet"
        yield Row("decode step, runner with graphs", case, None, "n/a", note=note)
        del runner
        torch.cuda.empty_cache()
