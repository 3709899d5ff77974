"""A worker without a model that notices every mistake in a plan.

Its model is ``hash_model``. Its KV cache remembers, for each slot of each physical block, the hash of the tokens up to
there; computing a position reads all earlier positions through the block table and compares. So a block that was freed
too early, copied wrongly or shared by mistake shows up as a wrong read in the very step in which it happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from pagemill_shared.messages import (
    GrammarCompiled,
    IterationPlan,
    IterationResult,
    PromptReport,
    RowFault,
    TokenLogprobs,
    WorkerHello,
    WorkerWelcome,
)
from pagemill_shared.sampling import Pooling, SamplingParams
from pagemill_shared.schema import Float32Array, Int32Array
from pagemill_testing.hash_model import START, best_candidates, extend, next_token, position_state, prompt_logprob

TAINTED = -1
"""Stands for keys and values that are not numbers."""
_NOTHING = -2


class PlanError(AssertionError):
    """The scheduler sent a plan that a worker could not carry out rightly."""


@dataclass
class FakeRow:
    """
    Attributes:
        hashes: of the tokens up to each position.
        compiled: it has no grammar, or one that is ready.
        failed: it could not be sampled, so there is no token to go on with until its slot is released.
    """

    tokens: list[int]
    prompt_length: int
    computed: int
    blocks: list[int]
    sampling: SamplingParams
    sequence: int
    hashes: list[int] = field(init=False)
    compiled: bool = True
    failed: bool = False

    def __post_init__(self) -> None:
        self.hashes = list(accumulate(self.tokens, extend, initial=START))[1:]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.hashes.append(extend(self.hashes[-1], token))


def worker_hello(identity: str = "w", **changes: object) -> WorkerHello:
    fields: dict[str, object] = {
        "identity": identity,
        "fingerprint": "model",
        "model": "hash",
        "device": "fake",
        "dtype": "none",
        "kernels": "fake",
        "vocab_size": 1000,
        "max_model_len": 256,
        "block_size": 4,
        "num_blocks": 64,
        "num_swap_blocks": 16,
        "block_bytes": 1024,
        "prefill_tokens_per_s": 1000.0,
        "swap_bytes_per_s": 1e6,
    }
    return WorkerHello(**(fields | changes))  # type: ignore[arg-type]


@dataclass
class FakeWorker:
    """Carries out plans.

    Attributes:
        faulty: prompts (as tuples) whose rows fail.
        sound_samples: when it is not None, after so many more sampling rows one of them fails. What it wrote is
            tainted, and so is whatever is computed from that.
        faults: rows that failed so far.
        plans: the plans carried out, if a list is put here.
        broken_grammars, slow_grammars: those that cannot be compiled, and those that are not ready yet. The others are
            ready as soon as the plan in which a sequence joins is carried out.
        compiling: (iteration, slot, grammar) of sequences that wait for it.
    """

    hello: WorkerHello
    epoch: int = 0
    iteration: int = 0
    rows: dict[int, FakeRow] = field(default_factory=dict)
    cache: dict[int, list[int]] = field(default_factory=dict)
    host: dict[int, list[int]] = field(default_factory=dict)
    seats: int = 0
    budget: int = 0
    computed_tokens: int = 0
    faulty: set[tuple[int, ...]] = field(default_factory=set)
    sound_samples: int | None = None
    faults: int = 0
    plans: list[IterationPlan] | None = None
    broken_grammars: set[str] = field(default_factory=set)
    slow_grammars: set[str] = field(default_factory=set)
    compiling: list[tuple[int, int, str]] = field(default_factory=list)

    def begin(self, welcome: WorkerWelcome) -> None:
        self.epoch, self.iteration = welcome.epoch, 0
        self.seats, self.budget = welcome.max_num_seqs, welcome.max_num_batched_tokens
        self.rows.clear()
        self.cache.clear()
        self.host.clear()
        self.compiling.clear()

    def compiled(self) -> list[GrammarCompiled]:
        """Grammars that are ready, or never will be, since the last call."""
        done = [item for item in self.compiling if item[2] not in self.slow_grammars]
        self.compiling = [item for item in self.compiling if item[2] in self.slow_grammars]
        messages = []
        for iteration, slot, grammar in done:
            broken = grammar in self.broken_grammars
            row = self.rows.get(slot)
            if row is not None and row.sampling.grammar == grammar and not broken:
                row.compiled = True
            messages.append(GrammarCompiled(self.epoch, iteration, slot, "it is broken" if broken else ""))
        return messages

    def execute(self, plan: IterationPlan) -> IterationResult:
        """
        Raises:
            PlanError: the plan is wrong.
        """
        self._require(plan.epoch == self.epoch and plan.iteration == self.iteration + 1, "plan out of turn")
        self.iteration += 1
        if self.plans is not None:
            self.plans.append(plan)
        self._update_rows(plan)
        self._move_blocks(plan)
        tokens: list[int] = []
        faults: list[RowFault] = []
        entries: list[tuple[int, Int32Array, Float32Array]] = []
        candidates: list[tuple[int, Int32Array, Float32Array]] = []
        reports: dict[int, PromptReport] = {}
        total = 0
        written: set[tuple[int, int]] = set()
        works = [(int(slot), -1, 1, 1) for slot in plan.decode_rows]
        works += [tuple(int(v) for v in chunk) for chunk in plan.prefill_chunks]
        self._require(len({w[0] for w in works}) == len(works), "a slot runs twice in one plan")
        owners: dict[int, list[FakeRow]] = {}
        for row in self.rows.values():
            for block in row.blocks:
                owners.setdefault(block, []).append(row)
        for slot, start, count, _ in works:
            self._require(slot in self.rows, f"slot {slot} is empty")
            row = self.rows[slot]
            total += count
            if row.failed:
                continue
            if start >= 0:
                self._require(start == row.computed, f"slot {slot}: chunk starts at {start}, computed {row.computed}")
            else:
                self._require(row.computed == len(row.tokens) - 1, f"slot {slot}: decode row has work left")
            self._write(slot, row, count, written, owners)
        for slot, _, count, samples in works:  # attention comes after all rows have written
            row = self.rows[slot]
            sound = not row.failed
            if sound:
                row.computed += count
                sound = self._read(slot, row)
                if not sound:
                    self._taint(row, count)
            if slot in plan.reporting:
                self._require(row.sampling.reports_prompt, f"slot {slot}: reports what nobody wants to know")
                if sound:
                    reports[slot] = _report(slot, row, count)
                else:
                    reports[slot] = PromptReport(slot, 0, 1)
                    self.faults += 1
                    faults.append(RowFault(slot, "nan", "logits are not finite"))
            if not samples:
                continue
            self._require(row.failed or row.computed == len(row.tokens), f"slot {slot}: samples too early")
            children = [child for parent, child, _ in plan.forks.tolist() if parent == slot]
            beam = row.sampling.beam_width
            self._require(samples == 1 + (0 if beam else len(children)), f"slot {slot}: {samples} samples")
            if not sound or self._fails(row):
                if not row.failed:
                    self._taint(row, count)
                self.faults += 1
                for target in [slot, *children]:
                    self.rows[target].failed = True
                faults.append(RowFault(slot, "nan", "logits are not finite"))
                tokens += [-1] * samples
                continue
            if not row.compiled:
                for target in [slot, *children]:
                    self.rows[target].failed = True
                faults.append(RowFault(slot, "grammar_timeout", "its grammar is not compiled yet"))
                tokens += [-1] * samples
                continue
            if beam:
                best = best_candidates(row.hashes[-1], row.sampling.num_candidates, self.hello.vocab_size)
                candidates.append((len(tokens), best.token_ids, best.values))
                tokens.append(int(best.token_ids[0]))
                continue
            prefix = row.hashes[-1]
            for target in [slot, *children]:
                sampled = self.rows[target]
                sampled.computed = row.computed
                token = next_token(prefix, row.sampling, sampled.sequence, self.hello.vocab_size)
                sampled.append(token)
                if row.sampling.logprobs is not None:
                    value = np.array([-len(sampled.tokens)], np.float32)
                    entries.append((len(tokens), np.array([token], np.int32), value))
                tokens.append(token)
        self._require(set(reports) == set(plan.reporting.tolist()), "a report without a chunk")
        self._require(total <= self.budget, f"{total} tokens, the budget is {self.budget}")
        self.computed_tokens += total
        return IterationResult(
            self.epoch,
            self.iteration,
            np.array(tokens, np.int32),
            logprobs=_packed(entries),
            candidates=_packed(candidates),
            faults=tuple(faults),
            reports=tuple(reports[slot] for slot in plan.reporting.tolist()),
        )

    def _update_rows(self, plan: IterationPlan) -> None:
        for slot in plan.released.tolist():
            self._require(slot in self.rows, f"slot {slot} released twice")
            del self.rows[slot]
        for join in plan.joined:
            self._require(join.slot not in self.rows, f"slot {join.slot} is taken")
            self._require(join.slot < self.seats, f"slot {join.slot} of {self.seats}")
            self.rows[join.slot] = FakeRow(
                join.token_ids.tolist(),
                join.prompt_length,
                join.computed,
                join.block_table.tolist(),
                join.sampling,
                join.sequence,
                compiled=not join.sampling.grammar,
            )
            if join.sampling.grammar:
                self.compiling.append((plan.iteration, join.slot, join.sampling.grammar))
        for parent, child, sequence in plan.forks.tolist():
            self._require(parent in self.rows and child not in self.rows, f"fork from {parent} to {child}")
            row = self.rows[parent]
            self._require(child < self.seats, f"slot {child} of {self.seats}")
            tokens, blocks = list(row.tokens), list(row.blocks)
            self.rows[child] = FakeRow(
                tokens, row.prompt_length, row.computed, blocks, row.sampling, sequence, compiled=row.compiled
            )
        replaced: dict[int, int] = {}
        for slot, position, block in plan.new_blocks.tolist():
            self._require(slot in self.rows, f"new block for empty slot {slot}")
            self._require(1 <= block <= self.hello.num_blocks, f"block {block} is outside the pool")
            blocks = self.rows[slot].blocks
            self._require(position <= len(blocks), f"slot {slot}: block {position} after {len(blocks)}")
            if position < len(blocks):
                replaced[block] = blocks[position]
                blocks[position] = block
            else:
                blocks.append(block)
        copies = {dst: src for src, dst in plan.block_copies.tolist()}
        self._require(replaced == copies, f"blocks replaced {replaced}, but copied {copies}")
        for slot, token in plan.chosen.tolist():
            row = self.rows[slot]
            self._require(
                row.sampling.beam_width and row.computed == len(row.tokens), f"slot {slot}: token out of turn"
            )
            row.append(token)

    def _move_blocks(self, plan: IterationPlan) -> None:
        for name in ("swap_out", "swap_in", "block_copies"):
            pairs = getattr(plan, name)
            self._require(len(set(pairs[:, 1].tolist())) == len(pairs), f"{name}: a destination twice")
        sources, targets = set(plan.block_copies[:, 0].tolist()), set(plan.block_copies[:, 1].tolist())
        self._require(not sources & targets, "a copied block is source and destination")
        for device, host in plan.swap_out.tolist():
            self._require(0 <= host < self.hello.num_swap_blocks, f"host block {host}")
            self.host[host] = list(self.cache.get(device, ()))
        for host, device in plan.swap_in.tolist():
            self._require(host in self.host, f"host block {host} holds nothing")
            self.cache[device] = list(self.host[host])
        for source, target in plan.block_copies.tolist():
            self.cache[target] = list(self.cache.get(source, ()))

    def _write(
        self, slot: int, row: FakeRow, count: int, written: set[tuple[int, int]], owners: dict[int, list[FakeRow]]
    ) -> None:
        size = self.hello.block_size
        for position in range(row.computed, row.computed + count):
            self._require(position < len(row.tokens), f"slot {slot}: token {position} is not known")
            self._require(position // size < len(row.blocks), f"slot {slot}: no block for position {position}")
            block, offset = row.blocks[position // size], position % size
            self._require((block, offset) not in written, f"slot {slot}: block {block} is written to by two rows")
            written.add((block, offset))
            value = row.hashes[position]
            for other in owners[block]:
                # A block that others share holds what they expect there, or this very plan makes it so.
                if other is not row and position < other.computed:
                    self._require(value == other.hashes[position], f"slot {slot}: overwrites block {block} of another")
            held = self.cache.setdefault(block, [])
            held.extend([_NOTHING] * (offset + 1 - len(held)))
            held[offset] = value

    def _fails(self, row: FakeRow) -> bool:
        if self.sound_samples is not None:
            self.sound_samples -= 1
            if self.sound_samples < 0:
                self.sound_samples = None
                return True
        return tuple(row.tokens[: row.prompt_length]) in self.faulty

    def _taint(self, row: FakeRow, count: int) -> None:
        """The ``count`` positions that the row has just computed are not numbers."""
        size = self.hello.block_size
        for position in range(row.computed - count, row.computed):
            self.cache[row.blocks[position // size]][position % size] = TAINTED

    def _read(self, slot: int, row: FakeRow) -> bool:
        """Compare all that the row attends to; False if something there is tainted."""
        size = self.hello.block_size
        sound = True
        for start in range(0, row.computed, size):
            wanted = row.hashes[start : min(start + size, row.computed)]
            found = self.cache.get(row.blocks[start // size], [])[: len(wanted)]
            if found == wanted:
                continue
            right = len(found) == len(wanted) and all(f in (w, TAINTED) for f, w in zip(found, wanted, strict=True))
            self._require(right, f"slot {slot}: reads another sequence's keys in positions {start}…")
            sound = False
        return sound

    def _require(self, condition: object, message: str) -> None:
        if not condition:
            raise PlanError(f"worker {self.hello.identity}, iteration {self.iteration}: {message}")


def _report(slot: int, row: FakeRow, count: int) -> PromptReport:
    start, end = row.computed - count, min(row.computed, row.prompt_length)
    logprobs = TokenLogprobs()
    if row.sampling.prompt_logprobs is not None:
        tokens = range(start + 1, min(end + 1, row.prompt_length))
        logprobs = _packed(
            [
                (i, np.array([row.tokens[p]], np.int32), np.array([prompt_logprob(row.hashes[p - 1])], np.float32))
                for i, p in enumerate(tokens)
            ]
        )
    pooled: list[float] = []
    if row.sampling.pooling == Pooling.MEAN:
        pooled = [sum(map(position_state, row.hashes[start:end]))]
    elif row.sampling.pooling == Pooling.LAST and end == row.prompt_length:
        pooled = [position_state(row.hashes[end - 1])]
    return PromptReport(slot, start, end, logprobs, np.array(pooled, np.float32))


def _packed(entries: list[tuple[int, Int32Array, Float32Array]]) -> TokenLogprobs:
    if not entries:
        return TokenLogprobs()
    return TokenLogprobs(
        rows=np.array([row for row, _, _ in entries], np.int32),
        counts=np.array([len(ids) for _, ids, _ in entries], np.int32),
        ranks=np.ones(len(entries), np.int32),
        token_ids=np.concatenate([ids for _, ids, _ in entries]),
        values=np.concatenate([values for _, _, values in entries]),
    )
