"""Beam searches on one runner: `BeamSearch` decides, the simple scheduler of `plan_driver` gives blocks and slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagemill_scheduler.beams import BeamSearch, Candidates, Continuation
from pagemill_shared.messages import IterationPlan, IterationResult
from pagemill_shared.sampling import SamplingParams
from pagemill_testing.plan_driver import DrivenSequence, PlanDriver


@dataclass(eq=False)
class DrivenSearch:
    """``beams`` run, best first; ``next`` says how they go on with the next step."""

    prompt: list[int]
    sampling: SamplingParams
    search: BeamSearch
    beams: list[DrivenSequence]
    next: list[Continuation] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.search.done

    @property
    def outputs(self) -> list[list[int]]:
        """Of the hypotheses, best first."""
        return [hypothesis.tokens.tolist() for hypothesis in self.search.hypotheses]

    @property
    def scores(self) -> list[float]:
        return [float(hypothesis.score) for hypothesis in self.search.hypotheses]


class BeamDriver(PlanDriver):
    """Drives beam searches in place of sampled sequences; all of them take part in each step."""

    searches: list[DrivenSearch]

    def add_search(self, prompt: list[int], sampling: SamplingParams) -> DrivenSearch:
        first = DrivenSequence(list(prompt), sampling, 0, sampling.max_tokens)
        search = DrivenSearch(list(prompt), sampling, BeamSearch(sampling), [first])
        self.searches = [*getattr(self, "searches", []), search]
        return search

    def run(self) -> None:
        while any(not search.done for search in self.searches):
            self.step_beams()

    def recompute_beams(self, search: DrivenSearch) -> None:
        """Preempts: takes up what was chosen, then drops slots and blocks of all beams."""
        for parent, child in self._go_on(search):
            child.table = list(parent.table)
            for block in child.table:
                self.references[block] += 1
        for beam, step in zip(search.beams, search.next, strict=True):
            beam.outputs.append(step.token)
            beam.computed = 0
            if beam.slot is not None:
                self._leave(beam)
            else:
                self._drop(beam)
        search.next = []

    def step_beams(self) -> IterationResult:
        """One iteration of all searches."""
        forks, chosen, joined = [], [], []
        new_blocks: list[tuple[int, int, int]] = []
        copies: list[tuple[int, int]] = []
        running = [search for search in self.searches if not search.done]
        for search in running:
            forks += [self._fork(parent, child) for parent, child in self._go_on(search)]
        rows, chunks = [], []
        for search in running:
            for beam, step in zip(search.beams, search.next, strict=False):
                beam.outputs.append(step.token)
                chosen.append((beam.slot, step.token))
            for beam in search.beams:
                if beam.slot is None:
                    joined.append(self._join(beam))
                for position in range(beam.computed, len(beam.tokens)):
                    self._own(beam, position // self.block_size, new_blocks, copies)
                if search.next:
                    rows.append(beam)
                else:
                    chunks.append((beam, beam.computed, len(beam.tokens) - beam.computed, 1))
                beam.computed = len(beam.tokens)
        plan = IterationPlan(
            epoch=7,
            iteration=len(self.plans) + 1,
            released=np.array(self._released, np.int32),
            joined=tuple(joined),
            forks=np.array(forks, np.int32).reshape(-1, 3),
            new_blocks=np.array(new_blocks, np.int32).reshape(-1, 3),
            block_copies=np.array(copies, np.int32).reshape(-1, 2),
            chosen=np.array(chosen, np.int32).reshape(-1, 2),
            decode_rows=np.array([beam.slot for beam in rows], np.int32),
            prefill_chunks=np.array([(beam.slot, *rest) for beam, *rest in chunks], np.int32).reshape(-1, 4),
        )
        self._released = []
        result = self.runner.execute(plan)
        self.plans.append(plan)
        self.results.append(result)
        order = [*rows, *(chunk[0] for chunk in chunks)]
        found = candidates_of(result)
        assert sorted(found) == list(range(len(order)))
        by_beam = {beam: found[index] for index, beam in enumerate(order)}
        for search in running:
            outputs = [np.array(beam.outputs, np.int32) for beam in search.beams]
            candidates = [by_beam[beam] for beam in search.beams]
            search.next = search.search.advance(candidates, outputs, [[] for _ in outputs])
            if search.done:
                for beam in search.beams:
                    self._leave(beam)
        return result

    def _go_on(self, search: DrivenSearch) -> list[tuple[DrivenSequence, DrivenSequence]]:
        """Makes ``search.beams`` those of the next step: dropped beams leave. Returns (parent, child) of those that
        are to be forked."""
        if not search.next:
            return []
        kept = {step.parent for step in search.next}
        for number, beam in enumerate(search.beams):
            if number not in kept:
                self._leave(beam)
        beams, forks = [], []
        for index, step in enumerate(search.next):
            parent = search.beams[step.parent]
            if parent not in beams:
                beams.append(parent)
                continue
            child = DrivenSequence(parent.prompt, parent.sampling, index, parent.wanted)
            child.outputs, child.computed = list(parent.outputs), parent.computed
            beams.append(child)
            forks.append((parent, child))
        search.beams = beams
        return forks

    def _fork(self, parent: DrivenSequence, child: DrivenSequence) -> tuple[int, int, int]:
        fork = super()._fork(parent, child)
        self.sequences.remove(child)
        return fork


def candidates_of(result: IterationResult) -> dict[int, Candidates]:
    """By index into the result's tokens, whose token each time is the best candidate."""
    entries, found = result.candidates, {}
    ends = np.cumsum(entries.counts)
    for row, end, count in zip(entries.rows.tolist(), ends, entries.counts, strict=True):
        ids, values = entries.token_ids[end - count : end], entries.values[end - count : end]
        assert result.token_ids[row] == ids[0]
        assert (np.diff(values) <= 0).all()
        assert len(set(ids.tolist())) == len(ids)
        found[row] = Candidates(ids, values)
    return found
