"""One prompt: its token ids, and what the scheduler tells of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagemill_gateway.choice import TokenLogprob
from pagemill_shared.messages import PromptReport, TokenLogprobs
from pagemill_shared.schema import Int32Array

Vector = npt.NDArray[np.float64]


class Prompt:
    """A prompt on its way through the scheduler.

    Args:
        token_ids: [P]
        first_shown: where its text begins: 1 behind a BOS that the tokenizer has added, else 0.
    """

    __slots__ = ("_reports", "array", "first_shown", "token_ids")

    def __init__(self, token_ids: list[int], first_shown: int = 0) -> None:
        self.token_ids = token_ids
        self.array: Int32Array = np.array(token_ids, np.int32)
        self.first_shown = first_shown
        self._reports: list[PromptReport] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, report: PromptReport) -> None:
        """What one of its chunks had to tell. Reports that begin anew, after a resync, replace those that came.

        Raises:
            ValueError: positions were left out.
        """
        if self._reports and report.start <= self._reports[0].start:
            self._reports.clear()
        if self._reports and report.start != self._reports[-1].end:
            raise ValueError(f"positions {self._reports[-1].end}..{report.start} of the prompt were not reported")
        self._reports.append(report)

    def logprobs(self) -> list[TokenLogprob]:
        """[P - 1] of all its tokens but the first.

        Raises:
            ValueError: they have not all come.
        """
        entries = [entry for report in self._reports for entry in unpack_logprobs(report.logprobs).values()]
        if [entry.token_id for entry in entries] != self.token_ids[1:]:
            raise ValueError(f"{len(entries)} log-probabilities came for {len(self.token_ids)} prompt tokens")
        return entries

    def pooled(self, mean: bool) -> Vector:
        """[hidden_size] the mean of the final hidden states, or that of the last token.

        Raises:
            ValueError: it has not come.
        """
        states = [report.pooled.astype(np.float64) for report in self._reports if len(report.pooled)]
        if not states:
            raise ValueError("no hidden state of the prompt has come")
        return np.sum(states, axis=0) / len(self.token_ids) if mean else states[-1]


def unpack_logprobs(packed: TokenLogprobs) -> dict[int, TokenLogprob]:
    """Entries by row of the token array that they belong to."""
    ids, values = packed.token_ids.tolist(), packed.values.tolist()
    entries = {}
    start = 0
    for row, count, rank in zip(packed.rows.tolist(), packed.counts.tolist(), packed.ranks.tolist(), strict=True):
        end = start + count
        top = list(zip(ids[start + 1 : end], values[start + 1 : end], strict=True))
        entries[row] = TokenLogprob(ids[start], values[start], rank, top)
        start = end
    return entries
