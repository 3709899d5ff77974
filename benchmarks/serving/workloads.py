"""What the client asks for: prompts of an exact number of tokens, the same for every system."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "paper",
    "train",
    "window",
    "garden",
    "bottle",
    "market",
    "silver",
    "forest",
    "engine",
    "letter",
    "ocean",
    "candle",
    "bridge",
    "summer",
    "pencil",
    "doctor",
    "winter",
    "yellow",
    "mirror",
    "castle",
    "planet",
    "kitchen",
    "farmer",
    "ticket",
    "island",
    "hammer",
]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that come in a closed loop: ``concurrency`` at any time, until all ``requests`` have been answered.

    Attributes:
        prompt, output: tokens of a request and of each answer to it.
        shared: how many of the prompt's tokens all requests begin with.
        n: answers to a request.
    """

    name: str
    concurrency: int
    requests: int
    prompt: int
    output: int
    shared: int = 0
    n: int = 1


FULL = (
    Workload("short", 1, 2, 64, 64),
    Workload("short", 8, 16, 64, 64),
    Workload("short", 32, 64, 64, 64),
    Workload("short", 64, 64, 64, 64),
    Workload("long prompt", 1, 1, 512, 64),
    Workload("long prompt", 8, 8, 512, 64),
    Workload("shared prefix", 32, 32, 544, 32, shared=512),
    Workload("n=4", 8, 8, 64, 64, n=4),
)
QUICK = tuple(
    replace(load, requests=load.concurrency, output=24)
    for load in FULL
    if load.name == "short" and load.concurrency in (1, 32)
)


class Prompts:
    """Makes texts of an exact length in tokens. Deterministic: the same seed gives the same texts."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))

    def make(self, load: Workload, seed: str) -> list[str]:
        """One text per request; two texts differ within their first words behind what they share."""
        source = random.Random(f"{seed} {load}")
        shared = self._text(source, load.shared) if load.shared else ""
        texts = [self._text(source, load.prompt, shared) for _ in range(load.requests)]
        assert len(set(texts)) == len(texts)
        return texts

    def _text(self, source: random.Random, length: int, start: str = "") -> str:
        """Words up to ``length`` tokens; every word here is one token with the blank before it, or a few."""
        text = start or f"{source.randrange(1000)}"
        while len(tokens := self._tokenizer.encode(text, add_special_tokens=False).ids) < length:
            text += f" {source.choice(WORDS)}"
        while len(tokens) > length or len(self._tokenizer.encode(text, add_special_tokens=False).ids) != length:
            tokens = tokens[:length] if len(tokens) > length else tokens[:-1]
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
            while len(self._tokenizer.encode(text, add_special_tokens=False).ids) < length:
                text += "."
        return text
