"""Which tokens a row may sample at all: ``allowed_token_ids`` and bad words, kept only for rows that ask for them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import Int32Array

Indices = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]

_NO_IDS = np.zeros(0, np.int64)


class TokenLimits:
    """
    Attributes:
        allowing: [S] slots with a list of allowed tokens.
        worded: [S] slots with bad words.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.allowing = np.zeros(max_num_seqs, np.bool_)
        self.worded = np.zeros(max_num_seqs, np.bool_)
        self._masks: dict[int, Bits] = {}
        self._words: dict[int, list[list[int]]] = {}

    def join(self, slot: int, params: SamplingParams) -> None:
        if params.allowed_token_ids.size:
            flags = np.zeros(-(-self._vocab_size // 8) * 8, np.bool_)
            flags[params.allowed_token_ids[params.allowed_token_ids < self._vocab_size]] = True
            self._masks[slot] = np.packbits(flags, bitorder="little")
            self.allowing[slot] = True
        if params.bad_word_ids.size:
            known = [word.tolist() for word in params.bad_words if word.max() < self._vocab_size]
            self._words[slot] = known
            self.worded[slot] = bool(known)

    def fork(self, parent: int, child: int) -> None:
        for kept in (self._masks, self._words):
            if parent in kept:
                kept[child] = kept[parent]  # type: ignore[assignment]
        self.allowing[child], self.worded[child] = self.allowing[parent], self.worded[parent]

    def release(self, slot: int) -> None:
        self._masks.pop(slot, None)
        self._words.pop(slot, None)
        self.allowing[slot] = self.worded[slot] = False

    def masks(self, slots: Indices) -> Bits:
        """[K, ceil(vocab_size / 8)] bits of the tokens that ``slots``, which are all ``allowing``, may sample."""
        return np.stack([self._masks[slot] for slot in slots.tolist()])

    def banned(self, slot: int, output: Int32Array) -> Indices:
        """The tokens that would complete a bad word behind ``output``."""
        tail = output.tolist()
        words = self._words[slot]
        ends = {word[-1] for word in words if len(word) == 1 or tail[-(len(word) - 1) :] == word[:-1]}
        return np.array(sorted(ends), np.int64) if ends else _NO_IDS
