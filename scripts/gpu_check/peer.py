"""transformers' own continuous batching over the same model and prompts, within one process: no HTTP, no text."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_check.server import cases
from gpu_check.shapes import LLAMA_1B, Shape, write_folder
from gpu_check.table import Row

NAME = "transformers, continuous batching"
PAGE = 256
"""Tokens of a page: its default."""
BATCH_TOKENS = 2048
"""Most tokens of an iteration: the default of --max-num-batched-tokens."""


def measure(device: torch.device, quick: bool, shape: Shape = LLAMA_1B) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield from throughputs(write_folder(shape, Path(folder), device), device, cases(shape, quick))


def throughputs(model: Path, device: torch.device, cases: Sequence[tuple[str, list[list[int]], int]]) -> Iterator[Row]:
    """Output tokens per second of ``cases``, as the server's section has them."""
    try:
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    except ImportError as error:
        yield Row(NAME, "", None, "n/a", note=str(error)[:200])
        return
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, local_files_only=True)
    loaded = loaded.to(device).eval()
    for case, prompts, output in cases:
        # Its own end token is no token of the model's, so that every request runs to its limit.
        config = GenerationConfig(
            max_new_tokens=output, do_sample=False, eos_token_id=loaded.config.vocab_size, pad_token_id=0
        )
        # Room for all requests at once; by default it would take most of the free memory.
        longest = max(map(len, prompts)) + output
        batching = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=len(prompts) * (-(-longest // PAGE) + 1), max_batch_tokens=BATCH_TOKENS
        )
        seconds = []
        for _ in range(2):  # the first builds what it needs
            begun = time.perf_counter()
            answers = loaded.generate_batch(
                inputs=prompts, generation_config=config, continuous_batching_config=batching
            )
            seconds.append(time.perf_counter() - begun)
        came = [len(answer.generated_tokens) for answer in answers.values()]
        if sorted(came) != [output] * len(prompts):
            raise RuntimeError(f"asked {len(prompts)} times for {output} tokens, got {sorted(set(came))}")
        yield Row(NAME, case, sum(came) / seconds[-1], "tokens/s", note="one process, without HTTP")
