"""Beam search, decided here from the workers' best continuations; equal to transformers' ``generate(num_beams=…)``."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagemill_scheduler.request import LogprobEntry
from pagemill_shared.messages import FinishReason
from pagemill_shared.sampling import EarlyStopping, SamplingParams
from pagemill_shared.schema import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class Candidates:
    """[K] best continuations of one running beam, best first."""

    token_ids: Int32Array
    values: Float32Array


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output. ``score`` is its log-probability over its length to the power of the length penalty."""

    score: np.float32
    tokens: Int32Array
    finish: FinishReason
    logprobs: list[LogprobEntry]


@dataclass(frozen=True, slots=True)
class Continuation:
    """One beam of the next step: ``parent`` (an index into the beams of this step) goes on with ``token``."""

    parent: int
    token: int


@dataclass(slots=True)
class BeamSearch:
    """The running beams' scores and the finished hypotheses of one request.

    Scores are summed in float32, as transformers does.

    Attributes:
        scores: [beams] sums of log-probabilities, best first.
        hypotheses: finished ones, best first, at most as many as beams.
        steps: tokens that each running beam has.
        improvable: whether a running beam may still make it among the hypotheses.
    """

    sampling: SamplingParams
    scores: Float32Array = field(default_factory=lambda: np.zeros(1, np.float32))
    hypotheses: list[Hypothesis] = field(default_factory=list)
    steps: int = 0
    improvable: bool = True
    done: bool = False

    def advance(
        self, candidates: list[Candidates], outputs: list[Int32Array], logprobs: list[list[LogprobEntry]]
    ) -> list[Continuation]:
        """Take in the continuations of every running beam.

        Args:
            candidates: per running beam.
            outputs: per running beam its output tokens so far.
            logprobs: per running beam the entries of its tokens; empty lists if the request asks for none.

        Returns:
            The beams of the next step, best first; none if the search is done.
        """
        sampling = self.sampling
        width = sampling.beam_width
        parents = np.repeat(np.arange(len(candidates)), [len(c.token_ids) for c in candidates])
        tokens = np.concatenate([c.token_ids for c in candidates])
        values = np.concatenate([c.values + self.scores[i] for i, c in enumerate(candidates)])
        best = np.lexsort((tokens, parents, -values))[: sampling.num_candidates]
        parents, tokens, values = parents[best], tokens[best], values[best]

        last = self.steps + 1 >= sampling.max_tokens
        hits = np.isin(tokens, sampling.end_token_ids) | last
        # Only what is among the best ``width`` may become a hypothesis; the rest is there to go on with.
        accepts = self.improvable and not (self.full and sampling.early_stopping == EarlyStopping.WHEN_FULL)
        for i in np.flatnonzero(hits[:width]) if accepts else ():
            self._finish(int(tokens[i]), values[i], outputs[parents[i]], logprobs[parents[i]], candidates[parents[i]])
        running = np.flatnonzero(~hits)[:width]
        self.steps += 1
        self.scores = values[running]
        self._judge(bool(hits.all()))
        if self.done:
            return []
        return [Continuation(int(parents[i]), int(tokens[i])) for i in running]

    @property
    def full(self) -> bool:
        return len(self.hypotheses) >= self.sampling.beam_width

    def _finish(
        self,
        token: int,
        value: np.float32,
        output: Int32Array,
        logprobs: list[LogprobEntry],
        candidates: Candidates,
    ) -> None:
        sampling = self.sampling
        score = np.float32(value / np.float32((self.steps + 1) ** sampling.length_penalty))
        if token in sampling.eos_token_ids and not sampling.ignore_eos:
            finish = FinishReason.EOS
        else:
            finish = FinishReason.STOP_TOKEN if token in sampling.stop_token_ids else FinishReason.LENGTH
        tokens = np.append(output, np.int32(token)).astype(np.int32, copy=False)
        entries = logprobs
        if sampling.logprobs is not None:
            entries = [*logprobs, entry_of(candidates, token, sampling.logprobs)]
        self.hypotheses.append(Hypothesis(score, tokens, finish, entries))
        self.hypotheses.sort(key=lambda h: -h.score)  # stable: an older one stays before an equal newer one
        del self.hypotheses[sampling.beam_width :]

    def _judge(self, all_ended: bool) -> None:
        """Whether going on can change the result."""
        sampling = self.sampling
        if len(self.scores) and self.full:
            never = sampling.early_stopping == EarlyStopping.NEVER and sampling.length_penalty > 0
            length = sampling.max_tokens if never else self.steps
            possible = np.float32(self.scores[0] / np.float32(length**sampling.length_penalty))
            self.improvable = self.improvable and bool(possible > self.hypotheses[-1].score)
        enough = self.full and sampling.early_stopping == EarlyStopping.WHEN_FULL
        self.done = all_ended or enough or not self.improvable


def entry_of(candidates: Candidates, token: int, count: int) -> LogprobEntry:
    """The log-probabilities to report for a beam's next ``token``: its own, then the ``count`` best."""
    index = int(np.flatnonzero(candidates.token_ids == token)[0])
    order = np.concatenate([[index], np.arange(min(count, len(candidates.token_ids)))])
    return LogprobEntry(index + 1, candidates.token_ids[order], candidates.values[order])
