"""Whether answers to few-shot questions are transformers' greedy ones, and how far quantised weights change them.

    python benchmarks/gsm8k_agreement.py FILE [--questions 50] [--quantizations none,int8,gguf] [--quick] [--json]

FILE is GSM8K's test set (JSON lines with `question` and `answer`, gzipped or not). The first rows are the examples of
every prompt, those behind them the questions, all sent at once to `pagemill serve` with the bundled model.

A greedy answer is checked token by token: one forward pass of transformers (float32) over prompt and answer must put
each token of the answer first, which is what its greedy search would have chosen there. Where it puts another first,
the first such token of an answer counts, and the gap between the two logits tells a near tie (below 1e-3, where sums of
floats in another order decide) from a difference. Of quantised weights, it is also counted how many tokens transformers
would have chosen behind the same text, how far the whole answer and the number it ends with are those of float32, and
how many numbers are right.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving.bundled import model_files
from serving.systems import pagemill, started

NEAR_TIE = 1e-3
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    token_ids: list[int]

    @property
    def number(self) -> str:
        """The last number, as the answers of the set end with it."""
        numbers = NUMBER.findall(self.text)
        return numbers[-1].replace(",", "").rstrip(".") if numbers else ""


def read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [json.loads(line) for line in file]


def prompts(rows: list[dict[str, str]], shots: int, questions: int) -> tuple[list[str], list[str]]:
    """Prompts and the right numbers."""
    examples = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows[:shots])
    asked = rows[shots : shots + questions]
    right = [row["answer"].rpartition("#### ")[2].replace(",", "") for row in asked]
    return [f"{examples}Question: {row['question']}\nAnswer:" for row in asked], right


async def ask(url: str, token_ids: list[list[int]], max_tokens: int) -> list[Answer]:
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:

        async def one(prompt: list[int]) -> Answer:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stop": ["\n\nQuestion:"]}
            response = await client.post("/v1/completions", json={**body, "return_token_ids": True})
            response.raise_for_status()
            choice = response.json()["choices"][0]
            return Answer(choice["text"], choice["token_ids"])

        return list(await asyncio.gather(*map(one, token_ids)))


@torch.inference_mode()
def choices(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """For each token of the answer: by how much another one leads it in transformers' logits, 0 if none does."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(dim=-1).values
    mine = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    return (best - mine).tolist()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--quantizations", default="none,int8,gguf", help="comma-separated; `none` comes first")
    parser.add_argument("--quick", action="store_true", help="6 questions, 32 tokens each")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.file is None:
        print("nothing measured: name the file of GSM8K's test set")
        return
    if arguments.quick:
        arguments.questions, arguments.max_tokens = 6, 32
    folder, _ = model_files()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts, right = prompts(read(arguments.file), arguments.shots, arguments.questions)
    token_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    print(f"{len(texts)} prompts of {min(map(len, token_ids))} to {max(map(len, token_ids))} tokens")
    cases: list[dict[str, Any]] = []
    reference: list[Answer] = []
    for quantization in arguments.quantizations.split(","):
        with (
            tempfile.TemporaryDirectory(prefix="pm-") as logs,
            started(pagemill(quantization), Path(logs) / "log") as running,
        ):
            answers = asyncio.run(ask(running.url, token_ids, arguments.max_tokens))
        reference = reference or answers
        behind = [choices(model, p, a.token_ids) for p, a in zip(token_ids, answers, strict=True)]
        firsts = [next((gap for gap in gaps if gap > 0), 0.0) for gaps in behind]
        tokens = sum(map(len, behind))
        case = {
            "quantization": quantization,
            "answers": len(answers),
            "as_transformers": sum(gap == 0.0 for gap in firsts),
            "near_ties": sum(0.0 < gap < NEAR_TIE for gap in firsts),
            "differ": sum(gap >= NEAR_TIE for gap in firsts),
            "tokens": tokens,
            "tokens_first": round(sum(gap == 0.0 for gaps in behind for gap in gaps) / tokens, 4),
            "same_text_as_float32": sum(a.text == r.text for a, r in zip(answers, reference, strict=True)),
            "same_number_as_float32": sum(a.number == r.number for a, r in zip(answers, reference, strict=True)),
            "right": sum(a.number == number for a, number in zip(answers, right, strict=True)),
        }
        cases.append(case)
        print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in case.items()), flush=True)
    if arguments.json:
        print(json.dumps({"benchmark": "gsm8k_agreement", "shots": arguments.shots, "cases": cases}))


if __name__ == "__main__":
    main()
