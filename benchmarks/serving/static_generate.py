"""transformers' generate() on static batches, as a program of its own in the environment that has transformers.

    python static_generate.py MODEL_FOLDER < one JSON object per line > one JSON object per line

A line asks for `prompts`, `output` tokens each, `batch` at a time and `n` answers each; the answer to it has what
`serving.client.Figures` has, or `error`. There is no server: requests that wait for a batch wait no longer than that,
and nothing is sent. The first line printed says that the model is loaded.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate(model: Any, tokenizer: Any, task: dict[str, Any]) -> dict[str, Any]:
    prompts, output, n = task["prompts"], task["output"], task["n"]
    first, per_token, tokens = [], [], 0
    sampling = {"do_sample": True, "num_return_sequences": n} if n > 1 else {"do_sample": False}
    begun = time.perf_counter()
    for start in range(0, len(prompts), task["batch"]):
        # All of a batch are sent when the batch before has ended: that is when their time begins.
        sent = time.perf_counter()
        batch = tokenizer(prompts[start : start + task["batch"]], return_tensors="pt", padding=True)
        clock = Clock()
        made = model.generate(
            **batch,
            max_new_tokens=output,
            min_new_tokens=output,
            pad_token_id=tokenizer.pad_token_id,
            stopping_criteria=[clock],
            **sampling,
        )
        tokens += (made.shape[1] - batch["input_ids"].shape[1]) * made.shape[0]
        rows = batch["input_ids"].shape[0]
        first += [1e3 * (clock.times[0] - sent)] * rows
        per_token += [1e3 * (clock.times[-1] - clock.times[0]) / max(1, output - 1)] * rows
    return {
        "output_tokens_per_s": tokens / (time.perf_counter() - begun),
        "ttft_ms_p50": statistics.median(first),
        "ttft_ms_p99": max(first),
        "tpot_ms_p50": statistics.median(per_token),
        "output_tokens": tokens,
    }


def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generate(model, tokenizer, {"prompts": ["Hello"], "output": 1, "n": 1, "batch": 1})
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        answer = generate(model, tokenizer, json.loads(line))
        answer["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
