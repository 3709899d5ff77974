"""What grammars add to a sampling step: masks, applying them, and taking in the sampled tokens.

No model runs: the logits are random, the grammar is a JSON schema whose text goes on and on, the tokenizer is the
bundled model's. So nearly every row's most likely token is forbidden; with a model, which mostly writes what it was
asked for, it is mostly allowed, and `allowed` stands for that. Each figure is the fastest of several steps.

    python benchmarks/grammar_masks.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits

from pagemill_shared.grammar_limits import PARSER_LIMITS
from pagemill_shared.manifest import read_manifest
from pagemill_shared.messages import GrammarCompiled
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.settings import WorkerSettings
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.grammar_rows import GrammarRows
from pagemill_worker.prepare import prepare_model
from pagemill_worker.sampler import sample
from pagemill_worker.sampling_rows import SamplingRows

SCHEMA = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 1000},
        "text": {"type": "string"},
    },
    "required": ["tags", "text"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Figures:
    """Milliseconds per step: masks, the whole of choosing rows and sampling, and taking in the tokens."""

    masks: float
    sampling: float
    advancing: float


def measure(
    folder: Path, count: int, temperature: float, grammar: str, steps: int, *, allowed: bool = False
) -> Figures:
    """``count`` rows, each with ``grammar``, or without where that is empty; the least of ``steps`` steps. With
    ``allowed`` the most likely token of each is one that its grammar allows."""
    manifest = read_manifest(folder)
    compiler = GrammarCompiler(folder, manifest.vocab_size, manifest.eos_token_ids)
    ready: queue.SimpleQueue[GrammarCompiled] = queue.SimpleQueue()
    grammars = GrammarRows(count, manifest.vocab_size, compiler, ready.put)
    rows = SamplingRows(count, manifest.vocab_size, torch.device("cpu"), grammars)
    slots, ends = np.arange(count), np.array(manifest.eos_token_ids, np.int32)
    for slot in range(count):
        sampling = SamplingParams(temperature=temperature, seed=slot, eos_token_ids=ends, grammar=grammar)
        rows.join(slot, sampling, np.array([1], np.int32), NOTHING)
        if grammar:
            grammars.join(slot, grammar, NOTHING, 1, 1)
            ready.get()
    logits = torch.randn(count, manifest.vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    times = np.full((steps, 3), np.inf)
    for step in range(steps):
        own = logits.clone()
        begun = time.perf_counter()
        batch = rows.select(
            slots,
            outputs=np.full(count, step),
            row_of=slots,
            sequences=np.zeros(count, np.int64),
            positions=np.full(count, step + 1),
            output_of=lambda _slot: NOTHING,
        )
        selected = time.perf_counter() - begun
        if allowed:
            bits = np.unpackbits(batch.masks, axis=1, bitorder="little")
            own[torch.from_numpy(batch.constrained), torch.from_numpy(bits.argmax(1))] = 100.0
        begun = time.perf_counter()
        tokens = sample(own, batch, rows).token_ids
        sampled = time.perf_counter()
        grammars.advance(slots, tokens)
        times[step] = selected, selected + sampled - begun, time.perf_counter() - sampled
    masks, sampling_ms, advancing = (times.min(0) * 1e3).tolist()
    return Figures(masks, sampling_ms, advancing)


def first_masks(folder: Path) -> dict[str, float]:
    """Milliseconds of the first mask of a schema with many branches: of the compiled grammar, and then of a row."""
    manifest = read_manifest(folder)
    compiler = GrammarCompiler(folder, manifest.vocab_size, manifest.eos_token_ids)
    compiler.start(GRAMMAR, NOTHING).result()  # reads the tokenizer
    found = []
    for attempt in range(5):
        schema = {"anyOf": [{"properties": {f"{attempt}/{i}": {}}, "required": [f"{attempt}/{i}"]} for i in range(600)]}
        grammar = LLMatcher.grammar_from_json_schema(schema)
        compiled = LLMatcher(compiler.tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        row = compiler.start(grammar, NOTHING).result()
        begun = time.perf_counter()
        compiled.compute_bitmask()
        between = time.perf_counter()
        row.compute_bitmask()
        found.append((between - begun, time.perf_counter() - between))
    alone, of_row = (np.array(found).min(0) * 1e3).round(3).tolist()
    return {"first_mask_ms": alone, "first_mask_of_a_row_ms": of_row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="fewer steps and rows")
    options = parser.parse_args()
    steps, counts = (10, (1, 32)) if options.quick else (40, (1, 32, 256))
    torch.set_num_threads(1)
    folder = prepare_model("bundled", WorkerSettings().cache_dir, lambda _step, _share: None)
    first = first_masks(folder)
    print(first, flush=True)
    cases: list[dict[str, float]] = []
    for count in counts:
        for temperature in (0.0, 1.0):
            plain, ours = (measure(folder, count, temperature, grammar, steps) for grammar in ("", GRAMMAR))
            likely = measure(folder, count, temperature, GRAMMAR, steps, allowed=True)
            cases.append(
                {
                    "rows": count,
                    "temperature": temperature,
                    "plain_ms": round(plain.sampling, 2),
                    "grammar_ms": round(ours.sampling, 2),
                    "allowed_ms": round(likely.sampling, 2),
                    "of_which_masks_ms": round(ours.masks - plain.masks, 2),
                    "advance_ms": round(ours.advancing, 2),
                }
            )
            print(cases[-1], flush=True)
    if options.json:
        print(json.dumps({**first, "cases": cases}))


if __name__ == "__main__":
    main()
