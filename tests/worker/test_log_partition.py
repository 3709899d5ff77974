"""Logits as log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagemill_worker.log_partition import log_partition


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("vocab_size", [3, 1000, 49_152])
def test_a_row_alone_has_the_bits_that_it_has_among_others(vocab_size: int) -> None:
    logits = torch.randn(33, vocab_size, generator=torch.Generator().manual_seed(0)) * 8
    together = log_partition(logits)
    alone = torch.cat([log_partition(logits[i : i + 1]) for i in range(len(logits))])
    assert torch.equal(together, alone)
    assert torch.equal(together[:5], log_partition(logits[:5]))
    torch.testing.assert_close(together, logits.double().logsumexp(-1, keepdim=True).float(), rtol=0, atol=1e-5)


def test_a_row_that_is_no_number_leaves_the_others() -> None:
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 2.0], [3.0, float("-inf")]])
    total = log_partition(logits)
    assert total[1].isnan()
    assert total[2] == 3
    assert torch.equal(total[0], log_partition(logits[:1])[0])
