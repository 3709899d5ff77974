"""Memory for weights."""

from __future__ import annotations

import mmap

import pytest
import torch

from pagemill_kernels.cpu.pages import LINE, PIECE, LargePages


def test_what_is_kept_is_handed_out_once() -> None:
    pages = LargePages()
    first, again = pages.reserve(100), pages.reserve(100)
    assert first.data_ptr() == again.data_ptr()
    pages.keep(first)
    second = pages.reserve(70)
    assert second.data_ptr() == first.data_ptr() + 2 * LINE
    pages.keep(second)
    first.fill_(1)
    second.fill_(2)
    assert pages.reserve(10).data_ptr() == second.data_ptr() + 2 * LINE
    assert (first.sum(), second.sum()) == (100, 140)


def test_more_than_a_piece_and_what_is_left_of_one() -> None:
    pages = LargePages()
    small, large = pages.reserve(1000), pages.reserve(PIECE + 1)
    assert (small.numel(), large.numel(), large.dtype) == (1000, PIECE + 1, torch.uint8)
    pages.keep(large)
    assert pages.reserve(1).data_ptr() % LINE == 0


def test_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    assert LargePages().reserve(10).numel() == 10
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert LargePages().reserve(10).numel() == 10
