"""Token counts behind repetition, presence and frequency penalties, kept only for rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill_shared.schema import Int32Array
from pagemill_worker.transfer import upload


class PenaltyCounts:
    """One line of counts per penalised slot, in tensors that grow as such slots appear.

    Attributes:
        output_counts: [P, vocab_size] int32, how often each token was generated.
        seen: [P, vocab_size] bool, which tokens prompt or output hold.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._line_of: dict[int, int] = {}
        self._free: list[int] = []
        self.output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def __contains__(self, slot: int) -> bool:
        return slot in self._line_of

    def join(self, slot: int, prompt: Int32Array, outputs: Int32Array) -> None:
        """Begins to count for ``slot``: what the prompt holds, and the outputs of an earlier run."""
        line = self._take(slot)
        vocab_size = self.output_counts.shape[1]
        counts = np.bincount(outputs, minlength=vocab_size).astype(np.int32)
        seen = counts > 0
        seen[prompt] = True
        self.output_counts[line], self.seen[line] = upload([counts, seen], self.seen.device)

    def fork(self, parent: int, child: int) -> None:
        if parent in self._line_of:
            source, line = self._line_of[parent], self._take(child)
            self.seen[line] = self.seen[source]
            self.output_counts[line] = self.output_counts[source]

    def release(self, slot: int) -> None:
        line = self._line_of.pop(slot, None)
        if line is not None:
            self._free.append(line)

    def lines(self, slots: Sequence[int]) -> Tensor:
        """[K] indices of the counts of ``slots``, which all are penalised."""
        return upload([np.array([self._line_of[slot] for slot in slots], np.int64)], self.seen.device)[0]

    def count(self, slots: npt.NDArray[np.int64], tokens: Int32Array) -> None:
        """Counts one more token for each of ``slots`` that is penalised; a slot stands there once."""
        if not self._line_of:
            return
        hits = [(self._line_of[s], t) for s, t in zip(slots.tolist(), tokens.tolist(), strict=True) if s in self]
        if hits:
            lines, ids = upload([np.array(hits, np.int64)], self.seen.device)[0].unbind(1)
            self.output_counts[lines, ids] += 1
            self.seen[lines, ids] = True

    def _take(self, slot: int) -> int:
        self.release(slot)
        if not self._free:
            size = self.output_counts.shape[0]
            more = max(4, size)
            self.output_counts = torch.cat((self.output_counts, self.output_counts.new_zeros(more, self._width)))
            self.seen = torch.cat((self.seen, self.seen.new_zeros(more, self._width)))
            self._free.extend(range(size + more - 1, size - 1, -1))
        line = self._line_of[slot] = self._free.pop()
        return line

    @property
    def _width(self) -> int:
        return self.output_counts.shape[1]
