"""Rows on the device equal those on the host after any plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import IterationPlan, SequenceJoin
from pagemill_shared.sampling import SamplingParams
from pagemill_worker.device_rows import DeviceRows
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.grammar_rows import GrammarRows
from pagemill_worker.rows import Rows
from pagemill_worker.transfer import upload

CPU = torch.device("cpu")
SLOTS, BLOCKS, WIDTH, VOCAB, BLOCK_SIZE = 6, 40, 9, 50, 4


class Both:
    """The rows on either side, changed by the same plans."""

    def __init__(self) -> None:
        grammars = GrammarRows(SLOTS, VOCAB, GrammarCompiler(Path("nowhere"), VOCAB, []), lambda message: None)
        self.host = Rows(SLOTS, BLOCKS, VOCAB, CPU, grammars)
        self.device = DeviceRows(SLOTS, WIDTH, CPU)

    def apply(self, plan: IterationPlan) -> None:
        self.host.apply(plan)
        self.device.apply(upload(self.device.delta(plan).arrays, CPU))
        self.check()

    def sample(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        drawn = torch.tensor(tokens)
        kept = [i for i, slot in enumerate(slots) if not self.host.sampling.candidates[slot]]
        self.device.append(torch.tensor(slots)[kept], drawn[kept])
        self.host.record(np.array(slots), np.array(tokens, np.int32))
        self.check()

    def check(self) -> None:
        for slot in np.flatnonzero(self.host.lengths).tolist():
            length, blocks = int(self.host.lengths[slot]), int(self.host.table_lengths[slot])
            assert int(self.device.lengths[slot]) == length
            assert int(self.device.newest[slot]) == self.host.tokens[slot, length - 1]
            assert self.device.tables[slot, :blocks].tolist() == self.host.tables[slot, :blocks].tolist()
        padding = self.device.padding
        assert (int(self.device.lengths[padding]), int(self.device.newest[padding])) == (1, 0)
        assert not self.device.tables[padding].any()


def join(slot: int, tokens: Sequence[int], blocks: Sequence[int], *, beam: bool = False) -> SequenceJoin:
    sampling = SamplingParams(temperature=0.0, beam_width=2 if beam else 0, n=2 if beam else 1)
    return SequenceJoin(
        slot=slot,
        sequence=0,
        prompt_length=1,
        computed=0,
        token_ids=np.array(tokens, np.int32),
        block_table=np.array(blocks, np.int32),
        sampling=sampling,
    )


def random_plan(host: Rows, rng: random.Random) -> IterationPlan:
    """Releases, joins, forks of old and new rows and of their children, blocks appended and replaced, beams' tokens."""
    taken = set(np.flatnonzero(host.lengths).tolist())
    released = [slot for slot in taken if rng.random() < 0.2]
    live = taken - set(released)
    beams = {slot for slot in live if host.sampling.candidates[slot]}
    blocks = {slot: int(host.table_lengths[slot]) for slot in live}
    joined, forks, new_blocks = [], [], []
    for slot in set(range(SLOTS)) - live:
        kind = rng.random()
        if kind < 0.4:
            count = rng.randint(1, 12)
            table = [rng.randint(1, BLOCKS) for _ in range(rng.randint(0, 4))]
            joined.append(join(slot, [rng.randrange(VOCAB) for _ in range(count)], table, beam=rng.random() < 0.3))
            live.add(slot)
            blocks[slot] = len(table)
            if joined[-1].sampling.beam_width:
                beams.add(slot)
    for slot in set(range(SLOTS)) - live:
        if live and rng.random() < 0.5:
            parent = rng.choice(sorted(live))
            forks.append((parent, slot, rng.randint(0, 9)))
            live.add(slot)
            blocks[slot] = blocks[parent]
            if parent in beams:
                beams.add(slot)
    for slot in live:
        for _ in range(rng.randint(0, 2)):
            position = rng.randint(max(0, blocks[slot] - 1), min(blocks[slot], WIDTH - 1))
            new_blocks.append((slot, position, rng.randint(1, BLOCKS)))
            blocks[slot] = max(blocks[slot], position + 1)
    chosen = [(slot, rng.randrange(VOCAB)) for slot in beams if rng.random() < 0.7]
    return IterationPlan(
        epoch=1,
        iteration=1,
        released=np.array(released, np.int32),
        joined=tuple(joined),
        forks=np.array(forks, np.int32).reshape(-1, 3),
        new_blocks=np.array(new_blocks, np.int32).reshape(-1, 3),
        chosen=np.array(chosen, np.int32).reshape(-1, 2),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_plans_leave_both_alike(seed: int) -> None:
    rng, both = random.Random(seed), Both()
    for _ in range(12):
        both.apply(random_plan(both.host, rng))
        live = np.flatnonzero(both.host.lengths).tolist()
        slots = sorted(rng.sample(live, rng.randint(0, len(live))))
        if slots:
            both.sample(slots, [rng.choice([-1, *range(VOCAB)]) for _ in slots])


def test_children_of_children_are_copies_of_what_the_first_was() -> None:
    both = Both()
    both.apply(
        IterationPlan(
            1,
            1,
            joined=(join(0, [7, 8, 9], [3, 4]),),
            forks=np.array([(0, 1, 1), (1, 2, 2)], np.int32),
            new_blocks=np.array([(0, 1, 5), (1, 1, 6), (2, 2, 7), (0, 1, 8)], np.int32),
        )
    )
    assert both.device.tables[:3, :3].tolist() == [[3, 8, 0], [3, 6, 0], [3, 4, 7]]
    assert both.device.newest[:3].tolist() == [9, 9, 9]


def test_inputs_of_rows_and_chunks() -> None:
    both = Both()
    both.apply(IterationPlan(1, 1, joined=(join(0, [5] * 6, [3, 9]), join(2, [1, 2, 3, 4, 5], [11, 12]))))
    chunks = torch.tensor([[2, 2], [3, 4], [4, 5]])
    inputs = both.device.inputs(torch.tensor([0, both.device.padding]), chunks, BLOCK_SIZE)
    assert inputs.token_ids.tolist() == [5, 0, 4, 5]
    assert inputs.positions.tolist() == [5, 0, 3, 4]
    assert inputs.slots.tolist() == [9 * 4 + 1, 0, 11 * 4 + 3, 12 * 4]
    assert inputs.slots.dtype == torch.int32


def test_a_table_longer_than_any_sequence_is_refused() -> None:
    device = DeviceRows(SLOTS, WIDTH, CPU)
    longer = IterationPlan(1, 1, new_blocks=np.array([(0, WIDTH, 1)], np.int32))
    with pytest.raises(ProtocolError, match=f"a block table of {WIDTH + 1} blocks, where a sequence has at most 9"):
        device.delta(longer)
    with pytest.raises(ProtocolError, match="a block table of 11 blocks"):
        device.delta(IterationPlan(1, 1, joined=(join(0, [1], range(1, 12)),)))
    with pytest.raises(ValueError, match="more than 2\\^31 entries"):
        DeviceRows(2**16, 2**15, torch.device("meta"))
