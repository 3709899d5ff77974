from __future__ import annotations

import pytest

from pagemill_worker.graphs import graph_sizes


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (17, [1, 2, 4, 8, 16, 17]),
        (256, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]),
    ],
)  # fmt: skip
def test_sizes_end_with_the_most_rows(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes
