"""What quantised weights and a smaller KV cache do to a model's logits: error, perplexity, most likely tokens.

    python benchmarks/logit_error.py [FILE …] [--tokens 1024] [--quantizations none,int8,gguf]
        [--kv-cache-dtypes auto,fp16,bf16,int8,fp8] [--model bundled] [--quick] [--json]

The text of the files (README.md and docs/architecture.md by default) is one prompt, computed in chunks of 64 tokens, so
that most of its keys and values come from the cache. Every setting is compared with float32 all through, at every
position: relative error of the logits (centred, norm of the difference by norm), mean Kullback–Leibler divergence, the
share of positions with the same most likely token, and perplexity of the text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from pagemill_kernels.interface import AttentionBatch
from pagemill_shared.manifest import prepared_folder
from pagemill_shared.settings import WorkerSettings
from pagemill_worker.load import load_worker

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 64


@torch.inference_mode()
def logits(settings: WorkerSettings, tokens: Tensor) -> tuple[Tensor, int]:
    """[T, vocab_size] float32, and bytes of a block of the cache."""
    runner, hello = load_worker(settings, lambda text, done: None)
    size, pool = runner.cache.block_size, runner.cache.pool
    width = -(-tokens.numel() // size)
    table = torch.arange(width, 0, -1).unsqueeze(0)
    parts = []
    for first in range(0, tokens.numel(), CHUNK):
        positions = torch.arange(first, min(first + CHUNK, tokens.numel()))
        batch = AttentionBatch(
            query_starts=torch.tensor([0, positions.numel()]),
            context_lens=positions[-1:] + 1,
            block_tables=table,
            slot_mapping=table[0, positions // size] * size + positions % size,
            num_decodes=0,
        )
        step = runner.kernels.prepare(batch, pool)
        hidden = runner.model.forward(tokens[positions], positions, pool, runner.kernels, step)
        parts.append(runner.model.logits(hidden))
    return torch.cat(parts), hello.block_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=[ROOT / "README.md", ROOT / "docs" / "architecture.md"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--quantizations", default="none,int8,gguf", help="comma-separated")
    parser.add_argument("--kv-cache-dtypes", default="auto,fp16,bf16,int8,fp8", help="comma-separated")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--quick", action="store_true", help="192 tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    count = 192 if arguments.quick else arguments.tokens
    quantizations, dtypes = arguments.quantizations.split(","), arguments.kv_cache_dtypes.split(",")

    def settings(quantization: str, dtype: str) -> WorkerSettings:
        fields = {"quantization": quantization, "kv_cache_dtype": dtype, "model": arguments.model}
        return WorkerSettings.model_validate({**fields, "num_threads": 1, "num_kv_blocks": 512, "num_swap_blocks": 0})

    load_worker(settings("none", "auto"), lambda text, done: None)  # prepares the model
    folder = prepared_folder(settings("none", "auto").cache_dir, arguments.model)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in arguments.files)
    tokens = torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:count])
    exact, _ = logits(settings("none", "auto"), tokens)
    wanted, exact = exact.log_softmax(-1), exact - exact.mean(-1, keepdim=True)
    cases = []
    print(f"{tokens.numel()} tokens in chunks of {CHUNK}")
    print("quantization  kv cache  block bytes  logit error  divergence  same first  perplexity")
    for quantization, dtype in [(q, "auto") for q in quantizations] + [("none", d) for d in dtypes if d != "auto"]:
        found, block_bytes = logits(settings(quantization, dtype), tokens)
        shares = found.log_softmax(-1)
        found = found - found.mean(-1, keepdim=True)
        case = {
            "quantization": quantization,
            "kv_cache_dtype": dtype,
            "block_bytes": block_bytes,
            "logit_error": float((found - exact).norm() / exact.norm()),
            "divergence": float(functional.kl_div(shares, wanted, log_target=True, reduction="batchmean")),
            "same_first": float((found.argmax(-1) == exact.argmax(-1)).float().mean()),
            "perplexity": float(functional.nll_loss(shares[:-1], tokens[1:]).exp()),
        }
        cases.append(case)
        print(
            f"{quantization:12}  {dtype:8}  {block_bytes:11}  {case['logit_error']:11.4%}  {case['divergence']:10.5f}"
            f"  {case['same_first']:10.2%}  {case['perplexity']:10.3f}",
            flush=True,
        )
    if arguments.json:
        print(json.dumps({"benchmark": "logit_error", "tokens": tokens.numel(), "cases": cases}))


if __name__ == "__main__":
    main()
