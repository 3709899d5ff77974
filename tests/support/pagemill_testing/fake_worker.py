"""A worker without a model that notices every mistake in a plan.

Its "model" is a hash: the next token is a function of all tokens before it. Its KV cache remembers, for each slot of
each physical block, the hash of the tokens up to there; computing a position reads all earlier positions through
the block table and compares. So a block that was freed too early, copied wrongly or shared by mistake shows up as a
wrong read in the very step in which it happens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from pagemill_scheduler.beams import BeamSearch, Candidates
from pagemill_shared.messages import IterationPlan, IterationResult, RowFault, TokenLogprobs, WorkerHello, WorkerWelcome
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import Float32Array, Int32Array


def prefix_hash(tokens: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(np.array(tokens, np.int32).tobytes(), digest_size=8).digest(), "big")


def _draw(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def next_token(tokens: list[int], sampling: SamplingParams, sequence: int, vocab_size: int) -> int:
    """The hash model's choice: greedy at temperature 0, otherwise also a function of seed, sequence and position."""
    draw = (sampling.seed, sequence) if sampling.temperature > 0 else (0, 0)
    return _draw(prefix_hash(tokens), draw) % vocab_size


def best_candidates(tokens: list[int], count: int, vocab_size: int) -> Candidates:
    """The hash model's ``count`` most likely continuations of a beam, best first."""
    prefix = prefix_hash(tokens)
    found: dict[int, None] = {}
    attempt = 0
    while len(found) < count:
        found[_draw(prefix, attempt) % vocab_size] = None
        attempt += 1
    steps = [1 + _draw(prefix, token, "value") % 64 for token in found]
    values = -np.cumsum(np.array(steps, np.float32)) / np.float32(64)
    return Candidates(np.array(list(found), np.int32), values.astype(np.float32))


def expected_output(prompt: list[int], sampling: SamplingParams, vocab_size: int, sequence: int = 0) -> list[int]:
    """What a sampled sequence must produce, whatever happens to it on the way."""
    tokens = list(prompt)
    ends = sampling.end_token_ids.tolist()
    while len(tokens) - len(prompt) < sampling.max_tokens:
        token = next_token(tokens, sampling, sequence, vocab_size)
        tokens.append(token)
        if token in ends and len(tokens) - len(prompt) >= sampling.min_tokens:
            break
    return tokens[len(prompt) :]


def expected_outputs(prompt: list[int], sampling: SamplingParams, vocab_size: int) -> list[list[int]]:
    """What every sequence of a request must produce: parallel samples, or the hypotheses of a beam search."""
    if not sampling.beam_width:
        return [expected_output(prompt, sampling, vocab_size, index) for index in range(sampling.n)]
    beams = BeamSearch(sampling)
    outputs = [np.zeros(0, np.int32)]
    while not beams.done:
        candidates = [
            best_candidates([*prompt, *output.tolist()], sampling.num_candidates, vocab_size) for output in outputs
        ]
        steps = beams.advance(candidates, outputs, [[] for _ in outputs])
        outputs = [np.append(outputs[step.parent], np.int32(step.token)).astype(np.int32) for step in steps]
    return [hypothesis.tokens.tolist() for hypothesis in beams.hypotheses[: sampling.n]]


class PlanError(AssertionError):
    """The scheduler sent a plan that a worker could not carry out rightly."""


@dataclass
class FakeRow:
    tokens: list[int]
    prompt_length: int
    computed: int
    blocks: list[int]
    sampling: SamplingParams
    sequence: int


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
    """

    hello: WorkerHello
    epoch: int = 0
    iteration: int = 0
    rows: dict[int, FakeRow] = field(default_factory=dict)
    cache: dict[int, dict[int, int]] = field(default_factory=dict)
    host: dict[int, dict[int, int]] = field(default_factory=dict)
    seats: int = 0
    budget: int = 0
    computed_tokens: int = 0
    faulty: set[tuple[int, ...]] = field(default_factory=set)

    def begin(self, welcome: WorkerWelcome) -> None:
        self.epoch, self.iteration = welcome.epoch, 0
        self.seats, self.budget = welcome.max_num_seqs, welcome.max_num_batched_tokens
        self.rows.clear()
        self.cache.clear()
        self.host.clear()

    def execute(self, plan: IterationPlan) -> IterationResult:
        """
        Raises:
            PlanError: the plan is wrong.
        """
        self._require(plan.epoch == self.epoch and plan.iteration == self.iteration + 1, "plan out of turn")
        self.iteration += 1
        self._update_rows(plan)
        self._move_blocks(plan)
        tokens: list[int] = []
        faults: list[RowFault] = []
        entries: list[tuple[int, Int32Array, Float32Array]] = []
        candidates: list[tuple[int, Int32Array, Float32Array]] = []
        total = 0
        written: set[tuple[int, int]] = set()
        works = [(int(slot), -1, 1, 1) for slot in plan.decode_rows]
        works += [tuple(int(v) for v in chunk) for chunk in plan.prefill_chunks]
        self._require(len({w[0] for w in works}) == len(works), "a slot runs twice in one plan")
        for slot, start, count, _ in works:
            self._require(slot in self.rows, f"slot {slot} is empty")
            row = self.rows[slot]
            if start >= 0:
                self._require(start == row.computed, f"slot {slot}: chunk starts at {start}, computed {row.computed}")
            else:
                self._require(row.computed == len(row.tokens) - 1, f"slot {slot}: decode row has work left")
            self._write(slot, row, count, written)
            total += count
        for slot, _, count, samples in works:  # attention comes after all rows have written
            row = self.rows[slot]
            row.computed += count
            self._read(slot, row)
            if not samples:
                continue
            self._require(row.computed == len(row.tokens), f"slot {slot}: samples too early")
            children = [child for parent, child, _ in plan.forks.tolist() if parent == slot]
            beam = row.sampling.beam_width
            self._require(samples == 1 + (0 if beam else len(children)), f"slot {slot}: {samples} samples")
            if tuple(row.tokens[: row.prompt_length]) in self.faulty:
                faults.append(RowFault(slot, "nan", "logits are not finite"))
                tokens += [-1] * samples
                continue
            if beam:
                best = best_candidates(row.tokens, row.sampling.num_candidates, self.hello.vocab_size)
                candidates.append((len(tokens), best.token_ids, best.values))
                tokens.append(int(best.token_ids[0]))
                continue
            for target in [slot, *children]:
                sampled = self.rows[target]
                sampled.computed = row.computed
                token = next_token(row.tokens[: row.computed], row.sampling, sampled.sequence, self.hello.vocab_size)
                sampled.tokens.append(token)
                if row.sampling.logprobs is not None:
                    value = np.array([-len(sampled.tokens)], np.float32)
                    entries.append((len(tokens), np.array([token], np.int32), value))
                tokens.append(token)
        self._require(total <= self.budget, f"{total} tokens, the budget is {self.budget}")
        self.computed_tokens += total
        return IterationResult(
            self.epoch,
            self.iteration,
            np.array(tokens, np.int32),
            logprobs=_packed(entries),
            candidates=_packed(candidates),
            faults=tuple(faults),
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
            )
        for parent, child, sequence in plan.forks.tolist():
            self._require(parent in self.rows and child not in self.rows, f"fork from {parent} to {child}")
            row = self.rows[parent]
            self._require(child < self.seats, f"slot {child} of {self.seats}")
            tokens, blocks = list(row.tokens), list(row.blocks)
            self.rows[child] = FakeRow(tokens, row.prompt_length, row.computed, blocks, row.sampling, sequence)
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
            row.tokens.append(token)

    def _move_blocks(self, plan: IterationPlan) -> None:
        for name in ("swap_out", "swap_in", "block_copies"):
            pairs = getattr(plan, name)
            self._require(len(set(pairs[:, 1].tolist())) == len(pairs), f"{name}: a destination twice")
        sources, targets = set(plan.block_copies[:, 0].tolist()), set(plan.block_copies[:, 1].tolist())
        self._require(not sources & targets, "a copied block is source and destination")
        for device, host in plan.swap_out.tolist():
            self._require(0 <= host < self.hello.num_swap_blocks, f"host block {host}")
            self.host[host] = dict(self.cache.get(device, {}))
        for host, device in plan.swap_in.tolist():
            self._require(host in self.host, f"host block {host} holds nothing")
            self.cache[device] = dict(self.host[host])
        for source, target in plan.block_copies.tolist():
            self.cache[target] = dict(self.cache.get(source, {}))

    def _write(self, slot: int, row: FakeRow, count: int, written: set[tuple[int, int]]) -> None:
        size = self.hello.block_size
        for position in range(row.computed, row.computed + count):
            self._require(position < len(row.tokens), f"slot {slot}: token {position} is not known")
            self._require(position // size < len(row.blocks), f"slot {slot}: no block for position {position}")
            block, offset = row.blocks[position // size], position % size
            self._require((block, offset) not in written, f"slot {slot}: block {block} is written to by two rows")
            written.add((block, offset))
            value = prefix_hash(row.tokens[: position + 1])
            for other in self.rows.values():
                # A block that others share holds what they expect there, or this very plan makes it so.
                if other is not row and position < other.computed and block in other.blocks:
                    wanted = prefix_hash(other.tokens[: position + 1])
                    self._require(value == wanted, f"slot {slot}: overwrites block {block} of slot {other}")
            self.cache.setdefault(block, {})[offset] = value

    def _read(self, slot: int, row: FakeRow) -> None:
        size = self.hello.block_size
        for position in range(row.computed):
            found = self.cache.get(row.blocks[position // size], {}).get(position % size)
            wanted = prefix_hash(row.tokens[: position + 1])
            self._require(found == wanted, f"slot {slot}: position {position} reads another sequence's keys")

    def _require(self, condition: object, message: str) -> None:
        if not condition:
            raise PlanError(f"worker {self.hello.identity}, iteration {self.iteration}: {message}")


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
