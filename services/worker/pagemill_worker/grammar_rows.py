"""The grammar matchers of all slots: which tokens each row may sample next."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from pagemill_shared.grammar_errors import in_our_words
from pagemill_shared.grammar_limits import GRAMMAR_FAILED, GRAMMAR_TIMEOUT
from pagemill_shared.messages import GrammarCompiled
from pagemill_shared.schema import Int32Array
from pagemill_worker.grammar_compiler import GrammarCompiler

_MAX_REASON = 1024

Bits = npt.NDArray[np.uint8]
Announce = Callable[[GrammarCompiled], None]


class GrammarRows:
    """A matcher for each slot that has a grammar. Used from the thread that carries out plans.

    Args:
        announce: told, from another thread, when the grammar of a sequence that joined is ready or cannot be had.

    Attributes:
        constrained: [S] slots that have a grammar.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, compiler: GrammarCompiler, announce: Announce) -> None:
        self.constrained = np.zeros(max_num_seqs, np.bool_)
        self._vocab_size = vocab_size
        self._compiler = compiler
        self._announce = announce
        self._matchers: dict[int, LLMatcher | Future[LLMatcher]] = {}
        self._faults: dict[int, tuple[str, str]] = {}

    def join(self, slot: int, grammar: str, outputs: Int32Array, epoch: int, iteration: int) -> None:
        """Begins to compile ``grammar`` for a sequence that has ``outputs`` already and joins in plan ``iteration``."""
        self.constrained[slot] = True
        future = self._compiler.start(grammar, outputs)
        self._matchers[slot] = future

        def tell(done: Future[LLMatcher]) -> None:
            error = done.exception()
            reason = "" if error is None else _reason(error)
            self._announce(GrammarCompiled(epoch, iteration, slot, reason))

        future.add_done_callback(tell)

    def fork(self, parent: int, child: int) -> None:
        """The child goes on from the parent's state, with a matcher of its own."""
        self.release(child)
        if not self.constrained[parent]:
            return
        self.constrained[child] = True
        matcher = self._matcher(parent)
        self._matchers[child] = self._matchers[parent] if matcher is None else matcher.deep_copy()

    def release(self, slot: int) -> None:
        if self.constrained[slot]:
            self.constrained[slot] = False
            del self._matchers[slot]
            self._faults.pop(slot, None)

    def advance(self, slots: npt.NDArray[np.int64], tokens: Int32Array) -> None:
        """Takes in one sampled token for each of ``slots`` that has a grammar."""
        mine = self.constrained[slots]
        if not mine.any():
            return
        for slot, token in zip(slots[mine].tolist(), tokens[mine].tolist(), strict=True):
            matcher = self._matcher(slot)
            if matcher is not None:
                matcher.consume_token(token)  # what goes wrong shows in the next mask

    def masks(self, slots: npt.NDArray[np.int64]) -> Bits:
        """[K, ceil(vocab_size / 8)] what each of ``slots``, which all have a grammar, may sample next: a bit for each
        token, the lowest first. A row without any is at fault: see ``fault``."""
        width = -(-self._vocab_size // 8)
        masks = np.zeros((slots.size, width), np.uint8)
        for line, slot in enumerate(slots.tolist()):
            matcher = self._matcher(slot)
            if matcher is None:
                continue
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)[:width]
            if matcher.is_error():
                self._faults[slot] = (GRAMMAR_FAILED, f"the grammar cannot go on: {in_our_words(matcher.get_error())}")
            else:
                masks[line, : mask.size] = mask
        return masks

    def fault(self, slot: int) -> tuple[str, str] | None:
        """Code and message of what the slot's grammar has run into."""
        return self._faults.get(slot)

    def _matcher(self, slot: int) -> LLMatcher | None:
        """None, and a fault, if it is not ready or never will be."""
        held = self._matchers[slot]
        if not isinstance(held, Future):
            return held
        if not held.done():
            self._faults[slot] = (GRAMMAR_TIMEOUT, "its grammar is not compiled yet")
            return None
        error = held.exception()
        if error is not None:
            self._faults[slot] = (GRAMMAR_FAILED, _reason(error))
            return None
        matcher = self._matchers[slot] = held.result()
        return matcher


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:_MAX_REASON]
