"""Carries out plans: memory operations, forward pass, sampling. Decides nothing, and knows no socket."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pagemill_kernels.interface import Kernels
from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import (
    IterationPlan,
    IterationResult,
    PromptReport,
    RowFault,
    TokenLogprobs,
    WorkerWelcome,
)
from pagemill_shared.schema import Int32Array
from pagemill_worker.batch import Batch, build_batch
from pagemill_worker.cache import KVCache
from pagemill_worker.forward import Forward, HostForward
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.grammar_rows import Announce, GrammarRows
from pagemill_worker.models.registry import Model
from pagemill_worker.moves import BlockMoves, Lanes, OneLane
from pagemill_worker.prompt_reports import prompt_reports
from pagemill_worker.rows import Rows
from pagemill_worker.sampler import Sampled, draw
from pagemill_worker.threads import ThreadPolicy, Threads
from pagemill_worker.transfer import upload

NON_FINITE = "non_finite_logits"
_NON_FINITE_FAULT = (NON_FINITE, "the model's logits are not finite numbers")


class Runner:
    """One replica's executing half.

    Attributes:
        forward: how iterations are computed.
        announce: told when a grammar is compiled, from another thread.
        threads: CPU threads of an iteration, by its tokens; those that torch was given until they are set.

    Args:
        clock: seconds of any monotonic clock, for the timings in results.
        forward: how iterations are computed; with arrays from the host by default.
        lanes: where block operations run; in order with everything else by default.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        kernels: Kernels[Any],
        max_model_len: int,
        device: torch.device,
        grammars: GrammarCompiler,
        clock: Callable[[], float] = time.perf_counter,
        *,
        forward: Forward | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self.model, self.cache, self.kernels = model, cache, kernels
        self.announce: Announce = lambda _message: None  # nobody waits for grammars before a shell does
        self.max_model_len = max_model_len
        self._device = device
        self._grammars = grammars
        self._clock = clock
        self.threads: Threads = ThreadPolicy(torch.get_num_threads(), torch.get_num_threads())
        self.forward = forward or HostForward(model, cache, kernels, device)
        self._moves = BlockMoves(cache, kernels, lanes or OneLane())
        self._rows: Rows | None = None
        self._budget = 0

    @torch.inference_mode()
    def begin(self, welcome: WorkerWelcome) -> None:
        """Begins an epoch: forgets every sequence. What the blocks hold means nothing any more."""
        seats, vocab_size = welcome.max_num_seqs, self.model.vocab_size
        grammars = GrammarRows(seats, vocab_size, self._grammars, self.announce)
        self._rows = Rows(seats, self.cache.num_blocks, vocab_size, self._device, grammars)
        self._budget = welcome.max_num_batched_tokens
        self._moves.begin()
        self.forward.begin(seats)

    def synchronize(self) -> None:
        """Waits until the device has done all that was asked of it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def execute(self, plan: IterationPlan) -> IterationResult:
        """Carries out one plan, in the order that `IterationPlan` states. How long the plan waited is left to whoever
        received it.

        Raises:
            ProtocolError: the plan contradicts what is known here, or no epoch has begun. The mirror may be half
                changed, so a new epoch has to begin.
        """
        rows = self._rows
        if rows is None:
            raise ProtocolError("a plan before the first welcome")
        begun = self._clock()
        rows.apply(plan)
        self._check_pairs(plan)
        batch = build_batch(plan, rows, self.cache.block_size, self.max_model_len)
        if batch is not None and batch.token_ids.size > self._budget:
            raise ProtocolError(f"the plan computes {batch.token_ids.size} tokens, {self._budget} were agreed on")
        self._moves.carry_out(plan)
        copied = self._clock()
        if batch is not None and self._device.type == "cpu":
            torch.set_num_threads(self.threads.of(batch.token_ids.size))
        hidden = self.forward.run(plan, batch, rows)
        logits = None if batch is None or hidden is None else self._logits(batch, hidden)
        computed = self._clock()
        if batch is not None:
            self.threads.took(batch.token_ids.size, computed - copied)
        reports, faults = self._report(batch, hidden, rows)
        sampled, unsampled = self._sample(batch, logits, rows)
        ended = self._clock()
        return IterationResult(
            epoch=plan.epoch,
            iteration=plan.iteration,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            candidates=sampled.candidates,
            faults=(*faults, *unsampled),
            reports=reports,
            copy_us=_micros(copied - begun),
            forward_us=_micros(computed - copied),
            sample_us=_micros(ended - computed),
        )

    def _logits(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor | None:
        """[R, vocab_size] logits of the rows that sample, or None without such."""
        if not batch.sampled_tokens.size:
            return None
        if batch.sampled_tokens.size < batch.token_ids.size:
            hidden = hidden[upload([batch.sampled_tokens], self._device)[0]]
        return self.model.logits(hidden)

    def _report(
        self, batch: Batch | None, hidden: torch.Tensor | None, rows: Rows
    ) -> tuple[tuple[PromptReport, ...], tuple[RowFault, ...]]:
        if batch is None or hidden is None or not batch.reporting:
            return (), ()
        reports, failed = prompt_reports(self.model, hidden, batch, rows)
        rows.faulty[failed] = True
        return tuple(reports), tuple(RowFault(slot, *_NON_FINITE_FAULT) for slot in failed)

    def _sample(
        self, batch: Batch | None, logits: torch.Tensor | None, rows: Rows
    ) -> tuple[Sampled, tuple[RowFault, ...]]:
        if batch is None or logits is None:
            return Sampled(np.zeros(0, np.int32), TokenLogprobs(), TokenLogprobs()), ()
        slots, owners = batch.sampled_slots, batch.token_slots
        if rows.faulty[slots].any():  # stays faulty: it computes with a token that was never drawn
            logits.index_fill_(0, upload([np.flatnonzero(rows.faulty[slots])], self._device)[0], torch.nan)
        selection = rows.sampling.select(
            slots,
            outputs=rows.lengths[slots] - rows.prompt_lengths[slots],
            row_of=batch.row_of,
            sequences=rows.sequences[owners],
            positions=rows.lengths[owners],
            output_of=rows.output_of,
        )
        drawn = draw(logits, selection, rows.sampling)
        self.forward.append(drawn.tokens)
        sampled = drawn.read()
        rows.record(owners, sampled.token_ids)
        failed = owners[sampled.token_ids < 0]
        grammars = rows.sampling.grammars
        return sampled, tuple(RowFault(slot, *grammars.fault(slot) or _NON_FINITE_FAULT) for slot in failed.tolist())

    def _check_pairs(self, plan: IterationPlan) -> None:
        device, host = (1, self.cache.num_blocks), (0, self.cache.num_swap_blocks - 1)
        for name, pairs, source, destination in (
            ("swap_out", plan.swap_out, device, host),
            ("swap_in", plan.swap_in, host, device),
            ("block_copies", plan.block_copies, device, device),
        ):
            for column, (low, high) in enumerate((source, destination)):
                _check_range(name, pairs[:, column], low, high)


def _check_range(name: str, blocks: Int32Array, low: int, high: int) -> None:
    if blocks.size and not (blocks.min() >= low and blocks.max() <= high):
        raise ProtocolError(f"{name} names blocks {blocks.min()}..{blocks.max()}, which are not within {low}..{high}")


def _micros(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
