from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pagemill_testing.tiny_models import make_runner, save, tiny_llama

from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import IterationPlan, WorkerWelcome
from pagemill_worker import measure


def ticking(step: float):  # type: ignore[no-untyped-def]
    now = [0.0]

    def clock() -> float:
        now[0] += step
        return now[0]

    return clock


@pytest.mark.parametrize("num_blocks", [1, 2, 64])
def test_rates_of_pools_of_any_size(num_blocks: int, tmp_path: Path) -> None:
    runner = make_runner(save(tiny_llama(), tmp_path), num_blocks=num_blocks, num_swap_blocks=20, max_model_len=200)
    assert measure.decode_seconds(runner, 30, ticking(0.5)) == 0.5
    assert measure.prefill_rate(runner, ticking(0.5)) == min(measure.PREFILL_TOKENS, 4 * num_blocks) / 0.5
    swapped = measure.swap_rate(runner, ticking(0.5))
    assert swapped == 2 * min(measure.SWAP_BLOCKS, num_blocks) * runner.cache.block_bytes / 0.5


def test_swapping_is_measured_by_what_swaps(tmp_path: Path) -> None:
    runner = make_runner(save(tiny_llama(), tmp_path), num_swap_blocks=3)
    runner.cache.pool[1:4] = 7.0
    runner.kernels.calls.clear()
    assert measure.swap_rate(runner) > 0
    assert runner.kernels.calls["copy_blocks"] > 0
    assert (runner.cache.host_pool == 7.0).all()
    assert (runner.cache.pool[1:4] == 7.0).all()


def test_without_a_host_pool_nothing_can_be_swapped(tmp_path: Path) -> None:
    assert measure.swap_rate(make_runner(save(tiny_llama(), tmp_path))) == 0.0


def test_nothing_of_the_measuring_is_left_after_a_welcome(tmp_path: Path) -> None:
    runner = make_runner(save(tiny_llama(), tmp_path))
    measure.decode_seconds(runner, 2)
    runner.begin(WorkerWelcome(1, 4, 100))
    with pytest.raises(ProtocolError, match="slot 0 is free"):
        runner.execute(IterationPlan(1, 1, decode_rows=np.array([0], np.int32)))
