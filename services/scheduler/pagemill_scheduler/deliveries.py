"""What an event has for one gateway, gathered into one Delivery."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagemill_shared.messages import Delivery, FinishReason, PromptReport, RequestFailure, TokenLogprobs
from pagemill_shared.schema import Float32Array, Int32Array

if TYPE_CHECKING:
    from pagemill_scheduler.request import LogprobEntry, Request, Sequence

_NO_LOGPROBS = TokenLogprobs()


def pack_logprobs(rows: list[int], entries: list[LogprobEntry]) -> TokenLogprobs:
    if not rows:
        return _NO_LOGPROBS
    return TokenLogprobs(
        rows=np.array(rows, np.int32),
        counts=np.array([len(entry.token_ids) for entry in entries], np.int32),
        ranks=np.array([entry.rank for entry in entries], np.int32),
        token_ids=np.concatenate([entry.token_ids for entry in entries]),
        values=np.concatenate([entry.values for entry in entries]),
    )


def _joined(arrays: abc.Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class DeliveryBuilder:
    """Collects entries: many one-token entries at once as arrays, or one sequence at a time."""

    def __init__(self) -> None:
        self._ones = np.ones(0, np.int32)
        self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self._columns: list[tuple[Int32Array, ...]] = []
        self._scores: list[Float32Array] = []
        self._tokens: list[Int32Array] = []
        self._num_tokens = 0
        self._logprob_rows: list[int] = []
        self._logprob_entries: list[LogprobEntry] = []
        self._failures: list[RequestFailure] = []
        self._reports: list[PromptReport] = []
        self.ended: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._columns or self._failures or self._reports or self.ended)

    def add_rows(
        self,
        handles: Int32Array,
        sequences: Int32Array,
        offsets: Int32Array,
        finishes: Int32Array,
        cached_tokens: Int32Array,
        tokens: Int32Array,
    ) -> None:
        """[K] entries of one token each."""
        if len(tokens) > len(self._ones):
            self._ones = np.ones(2 * len(tokens), np.int32)
        ones = self._ones[: len(tokens)]
        self._columns.append((handles, sequences, offsets, ones, finishes, cached_tokens))
        self._scores.append(np.zeros(len(tokens), np.float32))
        self._tokens.append(tokens)
        self._num_tokens += len(tokens)

    def add_sequence(self, sequence: Sequence, offset: int, tokens: Int32Array) -> None:
        """Output tokens ``offset`` … of one sequence, with their log-probabilities and its finish as it is now."""
        request = sequence.request
        entry = (request.handle, sequence.index, offset, len(tokens), int(sequence.finish), request.cached_tokens)
        self._scores.append(np.array([sequence.score], np.float32))
        self._columns.append(tuple(np.array([value], np.int32) for value in entry))
        entries = sequence.logprobs[offset : offset + len(tokens)]
        self._logprob_rows.extend(range(self._num_tokens, self._num_tokens + len(entries)))
        self._logprob_entries.extend(entries)
        self._tokens.append(tokens)
        self._num_tokens += len(tokens)

    def add_failure(self, failure: RequestFailure) -> None:
        self._failures.append(failure)

    def add_reports(self, reports: abc.Sequence[PromptReport]) -> None:
        """What chunks of a request's prompt had to tell, in order."""
        self._reports.extend(reports)

    def build(self, epoch: int, number: int) -> Delivery:
        """The delivery of all that was added, and start anew."""
        arrays: dict[str, Any] = {}
        if self._columns:
            names = ("handles", "sequences", "offsets", "counts", "finishes", "cached_tokens")
            arrays = {name: _joined(c) for name, c in zip(names, zip(*self._columns, strict=True), strict=True)}
            arrays["scores"] = _joined(self._scores)
            arrays["token_ids"] = _joined(self._tokens)
        delivery = Delivery(
            epoch,
            number,
            **arrays,
            logprobs=pack_logprobs(self._logprob_rows, self._logprob_entries),
            failures=tuple(self._failures),
            reports=tuple(self._reports),
        )
        self.reset()
        return delivery


def finish_codes(hits: list[int], full: npt.NDArray[np.bool_]) -> Int32Array:
    """[K] FinishReason per row: an end or stop token, at the places ``hits``, beats the length limit, where ``full`` is
    True. EOS stands for both kinds of hit."""
    codes = np.zeros(len(full), np.int32)
    if np.count_nonzero(full):
        codes[full] = FinishReason.LENGTH
    for place in hits:
        codes[place] = FinishReason.EOS
    return codes
