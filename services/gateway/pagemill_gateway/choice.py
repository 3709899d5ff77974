"""The text of one sequence: tokens go in, text and log-probabilities come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill_gateway.detokenizer import Detokenizer
from pagemill_gateway.stops import StopFinder
from pagemill_shared.messages import FinishReason

_FINISH_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP_TOKEN: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class TokenLogprob:
    """One output token with its log-probability.

    Attributes:
        rank: 1 is the most likely.
        top: the most likely tokens and their log-probabilities, best first.
        piece: the token's share of the text; the pieces of all tokens joined are the text.
        offset: where ``piece`` begins in the text.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    piece: str = ""
    offset: int = 0


class Choice:
    """The text of one sequence.

    Args:
        index: its number in the HTTP response.
        prompt_token_ids: [P] what it goes on from.
        stops: finds stop strings, or None.
        min_tokens: stop strings count from this many tokens on.
        show_stop_token: whether a stop token's own text belongs to the text.
    """

    __slots__ = (
        "_detokenizer",
        "_emitted",
        "_entries",
        "_min_tokens",
        "_pieces",
        "_pushed",
        "_show_stop_token",
        "_stops",
        "_token_ids",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "last_token",
        "num_tokens",
        "prompt_token_ids",
        "score",
        "stop_reason",
    )

    def __init__(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        detokenizer: Detokenizer,
        stops: StopFinder | None,
        min_tokens: int,
        show_stop_token: bool,
    ) -> None:
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.num_tokens = 0
        """Output tokens, up to the one that completed a stop string."""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        """The stop string or stop token that ended it."""
        self.cumulative_logprob = 0.0
        """Of the ``num_tokens`` output tokens, if their log-probabilities come along."""
        self.score = 0.0
        """What it is ranked by, where choices are ranked."""
        self.last_token: float | None = None
        """When the newest token came."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._show_stop_token = show_stop_token
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._entries: deque[TokenLogprob] = deque()
        self._pushed = 0  # characters that came out of the detokenizer
        self._emitted = 0  # characters that went to the client

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def ended_by_stop_string(self) -> bool:
        return self._stops is not None and self._stops.found is not None

    def push(self, tokens: Sequence[int], finish: int, logprobs: Sequence[TokenLogprob] | None) -> None:
        """Adds the next tokens; ``finish`` is the FinishReason after the last of them."""
        last = len(tokens) - 1
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            self._token_ids.append(token)
            ends = finish and position == last
            piece = "" if ends and self._is_hidden_end(finish) else self._detokenizer.push(token)
            if ends:
                piece += self._detokenizer.finish()
            self._add(piece, logprobs[position] if logprobs is not None else None)
            if self.finish_reason is not None:
                return
        if finish:
            if not tokens:
                self._add(self._detokenizer.finish(), None)
            if self.finish_reason is None:
                self._end(finish, tokens[-1] if tokens else None)

    def take(self) -> tuple[str, list[TokenLogprob]]:
        """Text and log-probabilities since the last call. A token's entry comes when all its text has come."""
        text = "".join(self._pieces)
        self._pieces.clear()
        if not self._entries:
            return text, []
        done = self.finish_reason is not None
        ready = []
        while self._entries and (done or self._entries[0].offset + len(self._entries[0].piece) <= self._emitted):
            entry = self._entries.popleft()
            entry.piece = entry.piece[: max(0, self._emitted - entry.offset)]  # a stop string has no share in the text
            ready.append(entry)
        return text, ready

    def take_token_ids(self) -> list[int]:
        """Output tokens since the last call, as counted by ``num_tokens``; they do not wait for held-back text."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids

    def _is_hidden_end(self, finish: int) -> bool:
        return finish == FinishReason.EOS or (finish == FinishReason.STOP_TOKEN and not self._show_stop_token)

    def _add(self, piece: str, entry: TokenLogprob | None) -> None:
        if entry is not None:
            entry.piece, entry.offset = piece, self._pushed
            self.cumulative_logprob += entry.logprob
            self._entries.append(entry)
        self._pushed += len(piece)
        if self._stops is not None:
            piece = self._stops.push(piece, self.num_tokens >= self._min_tokens)
            if self._stops.found is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.found
        if piece:
            self._emitted += len(piece)
            self._pieces.append(piece)

    def _end(self, finish: int, token: int | None) -> None:
        if self._stops is not None:
            held = self._stops.finish()
            self._emitted += len(held)
            self._pieces.append(held)
        self.finish_reason = _FINISH_REASONS[FinishReason(finish)]
        if finish == FinishReason.STOP_TOKEN:
            self.stop_reason = token
