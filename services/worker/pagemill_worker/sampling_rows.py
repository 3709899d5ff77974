"""Sampling parameters of all slots as arrays, and what a sampling pass takes from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import Int32Array
from pagemill_worker.grammar_rows import Bits, GrammarRows
from pagemill_worker.penalties import PenaltyCounts
from pagemill_worker.token_limits import TokenLimits

GREEDY_BELOW = 1e-3
"""Lower temperatures are greedy: float sums differ by this much between batches, so that what such a temperature would
make of a tie is noise."""

Indices = npt.NDArray[np.int64]
_NO_INDICES = np.zeros(0, np.int64)
_NO_MASKS = np.zeros((0, 0), np.uint8)


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes to single logits: K additions (logit_bias) and J bans. Rows index the logits of the pass."""

    bias_rows: Indices
    bias_ids: Indices
    bias_values: npt.NDArray[np.float32]
    ban_rows: Indices
    ban_ids: Indices


_NO_EDITS = Edits(_NO_INDICES, _NO_INDICES, np.zeros(0, np.float32), _NO_INDICES, _NO_INDICES)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """One sampling pass: R rows of logits, N tokens to draw from them (N > R where a row starts several sequences).

    Attributes:
        row_of: [N] row of logits that each token is drawn from, ascending.
        slots: [R] whose parameters rule the row.
        plain: every row is greedy and asks for nothing else, so that one argmax serves all.
        penalised: [K] rows with penalties.
        edits: logit_bias and bans.
        random: [K] rows that draw by chance.
        sequences, positions: [N] what, with the row's seed, each token's random number is made of.
        logprobs: [R] alternatives to report, -1 for none.
        beams: [K] rows of beams, which are not sampled; each has one token.
        candidates: [K] best continuations to report of each of them.
        constrained: [K] rows with a grammar.
        masks: [K, ceil(vocab_size / 8)] the tokens that each of them may sample, a bit each.
    """

    row_of: Indices
    slots: Indices
    plain: bool
    penalised: Indices
    edits: Edits
    random: Indices
    sequences: Indices
    positions: Indices
    logprobs: Indices
    beams: Indices
    candidates: Indices
    constrained: Indices
    masks: Bits


class SamplingRows:
    """Arrays over all slots. A slot is written when a sequence joins or forks, and read when it samples.

    Attributes:
        candidates: [S] best continuations that a beam reports in place of a sampled token; 0 for what is no beam.
        prompt_logprobs: [S] alternatives to report beside each prompt token, -1 for none.
        pooling: [S] Pooling.
        greedy: [S] rows that want their most likely token and nothing else, but for what a grammar rules.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, grammars: GrammarRows) -> None:
        self._vocab_size = vocab_size
        self.grammars = grammars
        n = max_num_seqs
        self.temperature = np.zeros(n, np.float64)
        self.top_k = np.zeros(n, np.int64)
        self.top_p = np.ones(n, np.float64)
        self.min_p = np.zeros(n, np.float64)
        self.repetition_penalty = np.ones(n, np.float32)
        self.presence_penalty = np.zeros(n, np.float32)
        self.frequency_penalty = np.zeros(n, np.float32)
        self.seed = np.zeros(n, np.uint64)
        self.min_tokens = np.zeros(n, np.int64)
        self.logprobs = np.full(n, -1, np.int64)
        self.candidates = np.zeros(n, np.int64)
        self.prompt_logprobs = np.full(n, -1, np.int64)
        self.pooling = np.zeros(n, np.int64)
        self.biased = np.zeros(n, np.bool_)
        self.penalised = np.zeros(n, np.bool_)
        self.greedy = np.zeros(n, np.bool_)
        self._bias: dict[int, tuple[Indices, npt.NDArray[np.float32]]] = {}
        self._banned: dict[int, Indices] = {}
        self.limits = TokenLimits(n, vocab_size)
        self.counts = PenaltyCounts(vocab_size, device)

    def join(self, slot: int, params: SamplingParams, prompt: Int32Array, outputs: Int32Array) -> None:
        self.release(slot)
        p = params
        self.temperature[slot] = p.temperature if p.temperature >= GREEDY_BELOW else 0.0
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = p.top_k, p.top_p, p.min_p
        self.repetition_penalty[slot] = p.repetition_penalty
        self.presence_penalty[slot], self.frequency_penalty[slot] = p.presence_penalty, p.frequency_penalty
        self.seed[slot] = p.seed
        self.logprobs[slot] = -1 if p.logprobs is None else p.logprobs
        self.prompt_logprobs[slot] = -1 if p.prompt_logprobs is None else p.prompt_logprobs
        self.pooling[slot] = p.pooling
        if p.beam_width:
            self.temperature[slot] = 0.0
            self.candidates[slot] = max(p.num_candidates, self.logprobs[slot])
            self.logprobs[slot] = -1
        ends = p.stop_token_ids if p.ignore_eos else np.concatenate((p.eos_token_ids, p.stop_token_ids))
        banned = self._known(np.unique(ends))
        self.min_tokens[slot] = p.min_tokens if banned.size else 0
        if self.min_tokens[slot]:
            self._banned[slot] = banned
        if p.logit_bias_ids.size:
            known = p.logit_bias_ids < self._vocab_size
            self._bias[slot] = (p.logit_bias_ids[known].astype(np.int64), p.logit_bias_values[known])
            self.biased[slot] = True
        self.limits.join(slot, p)
        if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
            self.penalised[slot] = True
            self.counts.join(slot, prompt, outputs)
        self.greedy[slot] = not (
            self.temperature[slot] > 0
            or self.logprobs[slot] >= 0
            or self.min_tokens[slot]
            or self.candidates[slot]
            or self.biased[slot]
            or self.penalised[slot]
            or self.limits.allowing[slot]
            or self.limits.worded[slot]
        )

    def fork(self, parent: int, child: int) -> None:
        self.release(child)
        for array in (
            self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, self.presence_penalty,
            self.frequency_penalty, self.seed, self.min_tokens, self.logprobs, self.candidates, self.biased,
            self.penalised, self.greedy,
        ):  # fmt: skip
            array[child] = array[parent]
        if parent in self._bias:
            self._bias[child] = self._bias[parent]
        if parent in self._banned:
            self._banned[child] = self._banned[parent]
        self.limits.fork(parent, child)
        self.grammars.fork(parent, child)
        self.counts.fork(parent, child)

    def release(self, slot: int) -> None:
        self._bias.pop(slot, None)
        self._banned.pop(slot, None)
        self.limits.release(slot)
        self.grammars.release(slot)
        self.counts.release(slot)
        self.biased[slot] = self.penalised[slot] = False
        self.min_tokens[slot] = self.candidates[slot] = 0

    def select(
        self,
        slots: Indices,
        outputs: Indices,
        row_of: Indices,
        sequences: Indices,
        positions: Indices,
        output_of: Callable[[int], Int32Array],
    ) -> SampleBatch:
        """The pass over rows of logits that belong to ``slots`` [R], which have generated ``outputs`` [R] tokens, those
        that ``output_of`` gives."""
        if self.greedy[slots].all() and not self.grammars.constrained[slots].any():
            return SampleBatch(
                row_of=row_of,
                slots=slots,
                plain=True,
                penalised=_NO_INDICES,
                edits=_NO_EDITS,
                random=_NO_INDICES,
                sequences=sequences,
                positions=positions,
                logprobs=self.logprobs[slots],
                beams=_NO_INDICES,
                candidates=_NO_INDICES,
                constrained=_NO_INDICES,
                masks=_NO_MASKS,
            )
        random = np.flatnonzero(self.temperature[slots] > 0)
        penalised = np.flatnonzero(self.penalised[slots])
        biased = np.flatnonzero(self.biased[slots])
        held = np.flatnonzero(outputs < self.min_tokens[slots])
        logprobs = self.logprobs[slots]
        beams = np.flatnonzero(self.candidates[slots])
        constrained = np.flatnonzero(self.grammars.constrained[slots])
        masks = _NO_MASKS
        if constrained.size:
            masks = self.grammars.masks(slots[constrained])
            held = held[~self._must_end(slots, held, constrained, masks)]
        allowing = np.flatnonzero(self.limits.allowing[slots])
        if allowing.size:
            constrained, masks = _merged(constrained, masks, allowing, self.limits.masks(slots[allowing]))
        worded = np.flatnonzero(self.limits.worded[slots])
        special = (random, penalised, biased, held, beams, constrained, worded)
        plain = not (any(rows.size for rows in special) or (logprobs >= 0).any())
        biases = [self._bias[slot] for slot in slots[biased].tolist()]
        bans = [self._banned[slot] for slot in slots[held].tolist()]
        bans += [self.limits.banned(slot, output_of(slot)) for slot in slots[worded].tolist()]
        held = np.concatenate((held, worded))
        edits = Edits(
            bias_rows=np.repeat(biased, [ids.size for ids, _ in biases]),
            bias_ids=np.concatenate([ids for ids, _ in biases]) if biases else _NO_INDICES,
            bias_values=np.concatenate([values for _, values in biases]) if biases else np.zeros(0, np.float32),
            ban_rows=np.repeat(held, [ids.size for ids in bans]),
            ban_ids=np.concatenate(bans) if bans else _NO_INDICES,
        )
        return SampleBatch(
            row_of=row_of,
            slots=slots,
            plain=plain,
            penalised=penalised,
            edits=edits,
            random=random,
            sequences=sequences,
            positions=positions,
            logprobs=logprobs,
            beams=beams,
            candidates=self.candidates[slots[beams]],
            constrained=constrained,
            masks=masks,
        )

    def _must_end(self, slots: Indices, held: Indices, constrained: Indices, masks: Bits) -> npt.NDArray[np.bool_]:
        """[H] which of the rows ``held`` below min_tokens have a grammar that is complete: only an end is left."""
        ends = np.zeros(held.size, np.bool_)
        for i, row in enumerate(held.tolist()):
            line = np.searchsorted(constrained, row)
            if line < constrained.size and constrained[line] == row:
                left = masks[line].copy()
                banned = self._banned[slots.item(row)]
                np.bitwise_and.at(left, banned // 8, ~np.left_shift(1, banned % 8).astype(np.uint8))
                ends[i] = not left.any()
        return ends

    def _known(self, ids: Int32Array) -> Indices:
        return ids[ids < self._vocab_size].astype(np.int64)


def _merged(rows: Indices, masks: Bits, more: Indices, more_masks: Bits) -> tuple[Indices, Bits]:
    """Two ascending sets of rows and the bits of what each may sample: a row of both may sample what both allow."""
    if not rows.size:
        return more, more_masks
    both = np.union1d(rows, more)
    bits = np.full((both.size, masks.shape[1]), 255, np.uint8)
    bits[np.searchsorted(both, rows)] = masks
    bits[np.searchsorted(both, more)] &= more_masks
    return both, bits
