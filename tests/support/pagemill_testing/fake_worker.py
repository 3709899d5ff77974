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

from pagemill_shared.messages import IterationPlan, IterationResult, RowFault, TokenLogprobs, WorkerHello, WorkerWelcome
from pagemill_shared.sampling import SamplingParams


def prefix_hash(tokens: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(np.array(tokens, np.int32).tobytes(), digest_size=8).digest(), "big")


def next_token(tokens: list[int], sampling: SamplingParams, sequence: int, vocab_size: int) -> int:
    """The hash model's choice: greedy at temperature 0, otherwise also a function of seed, sequence and position."""
    draw = (sampling.seed, sequence) if sampling.temperature > 0 else (0, 0)
    return (
        int.from_bytes(hashlib.blake2b(repr((prefix_hash(tokens), draw)).encode(), digest_size=8).digest(), "big")
        % vocab_size
    )


def expected_output(prompt: list[int], sampling: SamplingParams, vocab_size: int, sequence: int = 0) -> list[int]:
    """What a request must produce, whatever happens to it on the way."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        token = next_token(tokens, sampling, sequence, vocab_size)
        tokens.append(token)
        stops = [*sampling.stop_token_ids.tolist(), *([] if sampling.ignore_eos else sampling.eos_token_ids.tolist())]
        if token in stops and len(tokens) - len(prompt) >= sampling.min_tokens:
            break
    return tokens[len(prompt) :]


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
        "num_swap_blocks": 0,
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
    cache: dict[tuple[int, int], int] = field(default_factory=dict)
    seats: int = 0
    budget: int = 0
    computed_tokens: int = 0
    faulty: set[tuple[int, ...]] = field(default_factory=set)

    def begin(self, welcome: WorkerWelcome) -> None:
        self.epoch, self.iteration = welcome.epoch, 0
        self.seats, self.budget = welcome.max_num_seqs, welcome.max_num_batched_tokens
        self.rows.clear()
        self.cache.clear()

    def execute(self, plan: IterationPlan) -> IterationResult:
        """
        Raises:
            PlanError: the plan is wrong.
        """
        self._require(plan.epoch == self.epoch and plan.iteration == self.iteration + 1, "plan out of turn")
        self.iteration += 1
        self._update_rows(plan)
        tokens: list[int] = []
        faults: list[RowFault] = []
        entries: list[tuple[int, int, int]] = []
        total = 0
        works = [(int(slot), None, 1, 1) for slot in plan.decode_rows]
        works += [tuple(int(v) for v in chunk) for chunk in plan.prefill_chunks]
        self._require(len({w[0] for w in works}) == len(works), "a slot runs twice in one plan")
        for slot, start, count, samples in works:
            self._require(slot in self.rows, f"slot {slot} is empty")
            row = self.rows[slot]
            if start is not None:
                self._require(start == row.computed, f"slot {slot}: chunk starts at {start}, computed {row.computed}")
            else:
                self._require(row.computed == len(row.tokens) - 1, f"slot {slot}: decode row has work left")
            self._compute(slot, row, count)
            total += count
            self._require(samples == int(row.computed == len(row.tokens)), f"slot {slot}: samples {samples}")
            if not samples:
                continue
            if tuple(row.tokens[: row.prompt_length]) in self.faulty:
                faults.append(RowFault(slot, "nan", "logits are not finite"))
                tokens.append(-1)
                row.tokens.append(0)
                continue
            token = next_token(row.tokens, row.sampling, row.sequence, self.hello.vocab_size)
            row.tokens.append(token)
            if row.sampling.logprobs is not None:
                entries.append((len(tokens), token, len(row.tokens)))
            tokens.append(token)
        self._require(0 < total <= self.budget, f"{total} tokens, the budget is {self.budget}")
        self.computed_tokens += total
        return IterationResult(
            self.epoch,
            self.iteration,
            np.array(tokens, np.int32),
            logprobs=TokenLogprobs(
                rows=np.array([e[0] for e in entries], np.int32),
                counts=np.ones(len(entries), np.int32),
                ranks=np.ones(len(entries), np.int32),
                token_ids=np.array([e[1] for e in entries], np.int32),
                values=np.array([-e[2] for e in entries], np.float32),
            ),
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
        for slot, position, block in plan.new_blocks.tolist():
            self._require(slot in self.rows, f"new block for empty slot {slot}")
            self._require(1 <= block <= self.hello.num_blocks, f"block {block} is outside the pool")
            blocks = self.rows[slot].blocks
            self._require(position == len(blocks), f"slot {slot}: block {position} after {len(blocks)}")
            blocks.append(block)

    def _compute(self, slot: int, row: FakeRow, count: int) -> None:
        size = self.hello.block_size
        for position in range(row.computed, row.computed + count):
            self._require(position < len(row.tokens), f"slot {slot}: token {position} is not known")
            self._require(position // size < len(row.blocks), f"slot {slot}: no block for position {position}")
            self.cache[row.blocks[position // size], position % size] = prefix_hash(row.tokens[: position + 1])
        row.computed += count
        for position in range(row.computed):
            found = self.cache.get((row.blocks[position // size], position % size))
            wanted = prefix_hash(row.tokens[: position + 1])
            self._require(found == wanted, f"slot {slot}: position {position} reads another sequence's keys")

    def _require(self, condition: object, message: str) -> None:
        if not condition:
            raise PlanError(f"worker {self.hello.identity}, iteration {self.iteration}: {message}")
