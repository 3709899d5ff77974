"""Swaps at the side: who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pagemill_kernels.reference import TorchKernels
from pagemill_shared.messages import IterationPlan, SequenceJoin
from pagemill_shared.sampling import SamplingParams
from pagemill_worker.cache import KVCache
from pagemill_worker.models.config import CacheDescription
from pagemill_worker.moves import BlockMoves


class Recorder(TorchKernels):
    """Lanes and kernels that write down what they are asked for."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache, self.log = cache, list[str]()
        self._lane = "main"

    @contextmanager
    def side(self) -> Iterator[None]:
        self._lane = "side"
        yield
        self._lane = "main"

    def side_waits(self) -> None:
        self.log.append("side waits")

    def main_waits(self) -> None:
        self.log.append("main waits")

    def copy_blocks(self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> int:
        kind = {(False, False): "copy", (False, True): "out", (True, False): "in"}
        name = kind[source is self.cache.host_pool, destination is self.cache.host_pool]
        self.log.append(f"{self._lane}: {name} {pairs.tolist()}")
        return super().copy_blocks(source, destination, pairs)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(KVCache(CacheDescription(1, 1, 4), 2, 9, 4, torch.float32, torch.device("cpu")))


def pairs(*each: tuple[int, int]) -> np.ndarray:
    return np.array(each, np.int32)


def plan(
    iteration: int = 1, *, blocks: tuple[int, ...] = (), joined: tuple[int, ...] = (), **fields: np.ndarray
) -> IterationPlan:
    """``blocks`` are given to slot 0, ``joined`` to a sequence that joins slot 1."""
    join = SequenceJoin(
        slot=1,
        sequence=0,
        prompt_length=1,
        computed=0,
        token_ids=pairs((1, 1))[0],
        block_table=np.array(joined, np.int32),
        sampling=SamplingParams(),
    )
    return IterationPlan(
        1,
        iteration,
        joined=(join,) if joined else (),
        new_blocks=np.array([(0, i, block) for i, block in enumerate(blocks)], np.int32).reshape(-1, 3),
        **fields,
    )


def test_a_plan_that_touches_no_swapped_block_runs_beside_the_swap(recorder: Recorder) -> None:
    moves = BlockMoves(recorder.cache, recorder, recorder)
    moves.carry_out(plan(swap_out=pairs((1, 0), (2, 1)), blocks=(5,)))
    moves.carry_out(plan(blocks=(6,), block_copies=pairs((5, 6))))
    assert recorder.log == ["side waits", "side: out [[1, 0], [2, 1]]", "main: copy [[5, 6]]"]
    moves.carry_out(plan(blocks=(2,)))
    moves.carry_out(plan(blocks=(1,)))  # waited for already
    assert recorder.log[3:] == ["main waits"]


def test_blocks_that_the_same_plan_gives_away_are_waited_for_before_copies(recorder: Recorder) -> None:
    moves = BlockMoves(recorder.cache, recorder, recorder)
    moves.carry_out(plan(swap_out=pairs((1, 0)), swap_in=pairs((3, 4)), block_copies=pairs((7, 1))))
    assert recorder.log == [
        "side waits", "side: out [[1, 0]]", "side: in [[3, 4]]", "main waits", "main: copy [[7, 1]]",
    ]  # fmt: skip


@pytest.mark.parametrize("touch", [{"joined": (3, 4)}, {"blocks": (4,)}, {"block_copies": pairs((4, 8))}])
def test_what_is_swapped_in_is_waited_for_before_anybody_has_it(touch: dict[str, object], recorder: Recorder) -> None:
    moves = BlockMoves(recorder.cache, recorder, recorder)
    moves.carry_out(plan(swap_in=pairs((0, 4))))
    assert recorder.log == ["side waits", "side: in [[0, 4]]"]
    moves.carry_out(plan(**touch))  # type: ignore[arg-type]
    assert recorder.log[2] == "main waits"


def test_swaps_keep_their_order_and_wait_for_the_passes_before(recorder: Recorder) -> None:
    moves = BlockMoves(recorder.cache, recorder, recorder)
    recorder.cache.pool[1], recorder.cache.pool[2] = 1, 2
    moves.carry_out(plan(swap_out=pairs((1, 0))))
    moves.carry_out(plan(swap_in=pairs((0, 3)), swap_out=pairs((2, 1))))
    assert [entry.split(" [")[0] for entry in recorder.log] == [
        "side waits",
        "side: out",
        *["side waits"],
        "side: out",
        "side: in",
    ]
    assert float(recorder.cache.pool[3].mean()) == 1
    assert float(recorder.cache.host_pool[1].mean()) == 2


def test_a_new_epoch_waits_for_all(recorder: Recorder) -> None:
    moves = BlockMoves(recorder.cache, recorder, recorder)
    moves.begin()
    assert recorder.log == []
    moves.carry_out(plan(swap_out=pairs((1, 0))))
    moves.begin()
    moves.begin()
    assert recorder.log[2:] == ["main waits"]
