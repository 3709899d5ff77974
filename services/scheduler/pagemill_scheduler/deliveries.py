"""What an event has for one gateway, gathered into one Delivery, or into several where one would be too large."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagemill_shared.messages import NO_LOGPROBS, Delivery, FinishReason, PromptReport, RequestFailure, TokenLogprobs
from pagemill_shared.schema import Float32Array, Int32Array

if TYPE_CHECKING:
    from pagemill_scheduler.request import LogprobEntry, Request, Sequence

_PAGE_BYTES = 16 * 1024 * 1024
"""About how large a delivery gets before the next one is begun: well below what a frame may hold. After a resync it
holds all that a gateway's requests have produced."""
_PIECE_TOKENS = 32_768
"""Most tokens of one sequence in one entry: 6 MB with the most log-probabilities."""
_ENTRY_BYTES = 28
_LOGPROB_BYTES = 12
_LENGTH = np.array(FinishReason.LENGTH, np.int32)  # numpy takes a number apart more slowly
_ITEM_BYTES = 512
"""At least what a report or a failure takes, so that their number in a delivery stays below 65,536."""


def pack_logprobs(rows: list[int], entries: list[LogprobEntry]) -> TokenLogprobs:
    if not rows:
        return NO_LOGPROBS
    return TokenLogprobs(
        rows=np.array(rows, np.int32),
        counts=np.array([len(entry.token_ids) for entry in entries], np.int32),
        ranks=np.array([entry.rank for entry in entries], np.int32),
        token_ids=np.concatenate([entry.token_ids for entry in entries]),
        values=np.concatenate([entry.values for entry in entries]),
    )


def _joined(arrays: abc.Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class Page:
    """The content of one delivery."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_tokens = 0
        self.columns: list[tuple[Int32Array, ...]] = []
        self.scores: list[Float32Array] = []
        self.tokens: list[Int32Array] = []
        self.logprob_rows: list[int] = []
        self.logprob_entries: list[LogprobEntry] = []
        self.failures: list[RequestFailure] = []
        self.reports: list[PromptReport] = []

    def __bool__(self) -> bool:
        return bool(self.columns or self.failures or self.reports)

    def build(self, epoch: int, number: int) -> Delivery:
        logprobs = pack_logprobs(self.logprob_rows, self.logprob_entries)
        failures, reports = tuple(self.failures), tuple(self.reports)
        if not self.columns:
            return Delivery(epoch, number, logprobs=logprobs, failures=failures, reports=reports)
        columns: abc.Sequence[Int32Array] = self.columns[0]
        if len(self.columns) > 1:
            columns = [np.concatenate(column) for column in zip(*self.columns, strict=True)]
        handles, sequences, offsets, counts, finishes, cached_tokens = columns
        return Delivery(
            epoch,
            number,
            handles,
            sequences,
            offsets,
            counts,
            finishes,
            cached_tokens,
            _joined(self.scores),
            _joined(self.tokens),
            logprobs,
            failures,
            reports,
        )


class DeliveryBuilder:
    """Collects entries: many one-token entries at once as arrays, or one sequence at a time.

    What was added first is delivered first, so a request's reports never come behind its tokens.
    """

    def __init__(self) -> None:
        self._ones = np.ones(0, np.int32)
        self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self._full: list[Page] = []
        self._page = Page()
        self.ended: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._page or self._full or self.ended)

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
        page = self._page_for((_ENTRY_BYTES + 4) * len(tokens))
        page.columns.append((handles, sequences, offsets, ones, finishes, cached_tokens))
        page.scores.append(np.zeros(len(tokens), np.float32))
        page.tokens.append(tokens)
        page.num_tokens += len(tokens)

    def add_sequence(self, sequence: Sequence, offset: int, tokens: Int32Array) -> None:
        """Output tokens ``offset`` … of one sequence, with their log-probabilities and its finish as it is now."""
        while len(tokens) > _PIECE_TOKENS:
            self._add_piece(sequence, offset, tokens[:_PIECE_TOKENS], 0, 0.0)
            offset, tokens = offset + _PIECE_TOKENS, tokens[_PIECE_TOKENS:]
        self._add_piece(sequence, offset, tokens, int(sequence.finish), sequence.score)

    def _add_piece(self, sequence: Sequence, offset: int, tokens: Int32Array, finish: int, score: float) -> None:
        request = sequence.request
        entries = sequence.logprobs[offset : offset + len(tokens)]
        num_bytes = _ENTRY_BYTES + 4 * len(tokens)
        if entries:
            num_bytes += sum([_LOGPROB_BYTES + 8 * len(entry.token_ids) for entry in entries])
        page = self._page_for(num_bytes)
        entry = (request.handle, sequence.index, offset, len(tokens), finish, request.cached_tokens)
        page.scores.append(np.array([score], np.float32))
        page.columns.append(tuple(np.array([value], np.int32) for value in entry))
        page.logprob_rows.extend(range(page.num_tokens, page.num_tokens + len(entries)))
        page.logprob_entries.extend(entries)
        page.tokens.append(tokens)
        page.num_tokens += len(tokens)

    def add_failure(self, failure: RequestFailure) -> None:
        self._page_for(_ITEM_BYTES + 4 * len(failure.message)).failures.append(failure)

    def add_reports(self, reports: abc.Sequence[PromptReport]) -> None:
        """What chunks of a request's prompt had to tell, in order."""
        for report in reports:
            told = report.logprobs
            num_bytes = _LOGPROB_BYTES * len(told.rows) + 8 * len(told.token_ids) + report.pooled.nbytes
            self._page_for(_ITEM_BYTES + num_bytes).reports.append(report)

    def _page_for(self, num_bytes: int) -> Page:
        """The page that takes in the next ``num_bytes``: a new one where they would make the last one too large."""
        page = self._page
        if page.num_bytes + num_bytes > _PAGE_BYTES and page:
            self._full.append(page)
            page = self._page = Page()
        page.num_bytes += num_bytes
        return page

    def take(self) -> list[Page]:
        """What was added, one page at least, and start anew."""
        pages = [*self._full, self._page]
        self.reset()
        return pages


def finish_codes(hits: list[tuple[int, int]], full: npt.NDArray[np.bool_]) -> Int32Array:
    """[K] FinishReason per row: an end or stop token, given as ``hits`` (place, reason), beats the length limit, where
    ``full`` is True."""
    codes = np.zeros(len(full), np.int32)
    places = full.nonzero()[0]
    if len(places):
        codes[places] = _LENGTH
    for place, reason in hits:
        codes[place] = reason
    return codes
