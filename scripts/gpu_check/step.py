"""Decode step of a whole model with random weights, against the time in which its bytes can be read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from gpu_check.shapes import DTYPE, LLAMA_1B, LLAMA_8B, RandomWeights, Shape
from gpu_check.table import Row
from gpu_check.timing import milliseconds
from pagemill_kernels.gpu.kernels import TritonKernels
from pagemill_kernels.interface import ResidentKernels
from pagemill_shared.messages import IterationPlan, SequenceJoin, WorkerWelcome
from pagemill_shared.sampling import SamplingParams
from pagemill_worker.cache import KVCache
from pagemill_worker.forward import ResidentForward
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.graphs import CudaRecorder, Record
from pagemill_worker.models.architectures import ARCHITECTURES
from pagemill_worker.models.decoder import DecoderModel
from pagemill_worker.runner import Runner

BLOCK_SIZE = 16
CASES = ((LLAMA_8B, 1, 1024), (LLAMA_8B, 64, 1024), (LLAMA_1B, 1, 1024), (LLAMA_1B, 64, 1024))
AIM = 0.65


@dataclass(frozen=True)
class Loaded:
    """A model, and a pool for ``batch`` sequences of ``context`` tokens and some more."""

    model: DecoderModel
    cache: KVCache
    kernels: ResidentKernels[Any]
    longest: int

    def runner(self, recorder: Callable[[], Record] | None) -> Runner:
        """As a worker on a GPU has it; without CUDA graphs where ``recorder`` is None."""
        device = self.cache.pool.device
        forward = ResidentForward(self.model, self.cache, self.kernels, device, self.longest, recorder)
        no_grammars = GrammarCompiler(Path(), self.model.vocab_size, [])
        return Runner(self.model, self.cache, self.kernels, self.longest, device, no_grammars, forward=forward)


def load(
    shape: Shape, batch: int, context: int, steps: int, device: torch.device, kernels: ResidentKernels[Any]
) -> Loaded:
    """Random weights, and room for ``steps`` more tokens of each sequence."""
    longest = context + steps + 1
    weights = cast(Any, RandomWeights(shape, device))
    model = DecoderModel(ARCHITECTURES["LlamaForCausalLM"](shape.config), weights, longest, DTYPE, device)
    cache = KVCache(model.cache, BLOCK_SIZE, batch * -(-longest // BLOCK_SIZE), 0, DTYPE, device)
    cache.pool.normal_()
    return Loaded(model, cache, kernels, longest)


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
def device_seconds(runner: Runner, batch: int) -> float:
    """Median seconds of the forward pass up to the logits, replayed: what the device needs, with no host between."""
    forward = cast(ResidentForward, runner.forward)
    assert forward.graphs is not None
    repeat = forward.graphs.recorded(batch)
    return milliseconds(lambda _: runner.model.logits(repeat()), 20) / 1e3


def measure(device: torch.device, bandwidth: float, quick: bool) -> Iterator[Row]:
    steps = 24
    for shape, batch, context in CASES[2:] if quick else CASES:
        loaded = load(shape, batch, context, steps, device, TritonKernels.on(device))
        case = f"{shape.name}, {batch} x {context}"
        # A copy reads and writes; what only reads is bound by the same total.
        floor = shape.step_bytes(batch, context) / bandwidth
        eager = run_steps(loaded.runner(None), batch, context, steps)
        yield Row("decode step, no graphs", case, eager * 1e3, "ms", floor / eager)
        runner = loaded.runner(partial(CudaRecorder, device))
        graphs = run_steps(runner, batch, context, steps)
        yield Row("decode step, graphs", case, graphs * 1e3, "ms", floor / graphs, AIM if batch == 64 else None)
        replay = device_seconds(runner, batch)
        yield Row("of that, forward pass on the device", case, replay * 1e3, "ms", floor / replay)
        idle = max(0.0, 1 - replay / graphs)
        yield Row("of that, neither forward pass nor logits", case, idle * 100, "%")
        del runner, loaded
        torch.cuda.empty_cache()
