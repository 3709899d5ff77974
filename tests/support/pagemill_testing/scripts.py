"""What a stub scheduler answers requests with, and how far each request has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pagemill_shared.messages import FinishReason, PromptReport, SubmitRequest, TokenLogprobs


@dataclass(frozen=True)
class Script:
    """What a request is answered with.

    Attributes:
        token_ids: the output, the end token included where there is one.
        finish: with the last token; NOT_FINISHED leaves the request open.
        per_delivery: tokens in one delivery.
        logprobs: gives (token ids, values) for an output token: itself first, then the most likely ones.
        failure: (code, message, param) instead of tokens.
        sequences: the output of each sequence, where they are not all ``token_ids``.
        finishes: how each sequence ends, where not all end with ``finish``.
        scores: of the sequences, as a beam search has them; the whole output is then delivered at once.
    """

    token_ids: Sequence[int] = ()
    finish: FinishReason = FinishReason.LENGTH
    per_delivery: int = 1
    logprobs: Callable[[int], tuple[list[int], list[float]]] | None = None
    failure: tuple[str, str, str] | None = None
    sequences: Sequence[Sequence[int]] = ()
    finishes: Sequence[FinishReason] = ()
    scores: Sequence[float] = ()

    def output(self, sequence: int) -> Sequence[int]:
        return self.sequences[sequence] if self.sequences else self.token_ids

    def finish_of(self, sequence: int) -> FinishReason:
        return self.finishes[sequence] if self.finishes else self.finish

    def score(self, sequence: int) -> float:
        return self.scores[sequence] if self.scores else 0.0


@dataclass
class Row:
    """One entry of a delivery."""

    handle: int
    sequence: int
    offset: int
    count: int
    finish: int
    score: float


class Running:
    """One request in the stub.

    Attributes:
        sent: tokens that were delivered, of each sequence.
        open: sequences that have not ended.
    """

    def __init__(self, submit: SubmitRequest, script: Script) -> None:
        self.submit = submit
        self.script = script
        self.sent = [0] * submit.sampling.n
        self.open = set(range(submit.sampling.n))
        self.reported = not submit.sampling.reports_prompt
        self._ended_here: set[int] = set()

    @property
    def all_sent(self) -> bool:
        return all(sent == len(self.script.output(i)) for i, sent in enumerate(self.sent))

    def next_row(self, sequence: int) -> tuple[Row, list[int]] | None:
        """What comes next of a sequence, with its tokens."""
        script, start = self.script, self.sent[sequence]
        output = script.output(sequence) if self.submit.sampling.max_tokens else ()
        count = len(output) if script.scores else script.per_delivery
        new = list(output[start : start + count])
        ended = start + len(new) == len(output) and script.finish_of(sequence) is not FinishReason.NOT_FINISHED
        if not new and not ended:
            return None
        self.sent[sequence] += len(new)
        if ended:
            self.open.discard(sequence)
            self._ended_here.add(sequence)
        finish, score = (int(script.finish_of(sequence)), script.score(sequence)) if ended else (0, 0.0)
        return Row(self.submit.handle, sequence, start, len(new), finish, score), new

    def rewind(self) -> None:
        """All that it has produced is delivered again, ends included, save what the gateway ended."""
        self.sent = [0] * len(self.sent)
        self.reported = not self.submit.sampling.reports_prompt
        self.open |= self._ended_here
        self._ended_here.clear()


def prompt_report(submit: SubmitRequest) -> PromptReport:
    """What the stub tells of a prompt: token p has the log-probability -p / 8, and the rank p; the alternatives are the
    tokens from 3 on, each a quarter less likely than the one before. The hidden states are (1, its length)."""
    prompt, sampling = submit.prompt_token_ids, submit.sampling
    logprobs = TokenLogprobs()
    if sampling.prompt_logprobs is not None:
        positions = np.arange(1, len(prompt), dtype=np.int32)
        alternatives = np.arange(sampling.prompt_logprobs, dtype=np.int32)
        logprobs = TokenLogprobs(
            rows=positions - 1,
            counts=np.full(len(positions), 1 + len(alternatives), np.int32),
            ranks=positions,
            token_ids=np.array([[token, *(3 + alternatives)] for token in prompt[1:]], np.int32).ravel(),
            values=np.array([[-p / 8, *(-alternatives / 4)] for p in positions], np.float32).ravel(),
        )
    pooled = np.array([1, len(prompt)] if sampling.pooling else [], np.float32)
    return PromptReport(submit.handle, 0, len(prompt), logprobs, pooled)
