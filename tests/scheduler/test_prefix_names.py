"""The names of the prefix cache against a plain dict of token tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill_testing.plain import needs_plain_core

from pagemill_scheduler import prefix_names
from pagemill_scheduler.prefix_names import NO_KEY, NO_SALT, PrefixNames, Run

SIZE = 2
NUM_BLOCKS = 40

texts = st.lists(st.integers(0, 1), min_size=SIZE, max_size=6 * SIZE)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


class Cache:
    """Names blocks as the scheduler does, and keeps beside it what each block holds: the salt and all tokens so far."""

    def __init__(self) -> None:
        self.names = PrefixNames(NUM_BLOCKS, SIZE)
        self.free = list(range(NUM_BLOCKS, 0, -1))
        self.holds: dict[int, tuple[str, tuple[int, ...]]] = {}

    def run(self, salt: str, text: list[int]) -> None:
        """A sequence with ``text`` starts: it shares what is there and names the rest."""
        text = text[: len(text) // SIZE * SIZE]
        found, node, _ = self.names.find(self.names.root(salt), np.array(text, np.int32))
        for i, block in enumerate(found):
            assert self.holds[block] == (salt, tuple(text[: (i + 1) * SIZE]))
        missing = len(text) // SIZE - len(found)
        if not missing or missing > len(self.free):
            return
        blocks = [self.free.pop() for _ in range(missing)]
        for i, block in enumerate(blocks, len(found)):
            self.holds[block] = (salt, tuple(text[: (i + 1) * SIZE]))
        self.names.name_run(node, np.array(text[len(found) * SIZE :], np.int32), np.array(blocks, np.int32))
        again, _, _ = self.names.find(self.names.root(salt), np.array(text, np.int32))
        assert again == found + blocks

    def forget(self, pick: int) -> None:
        named = np.flatnonzero(self.names.named).astype(np.int32)
        if len(named):
            block = named[pick % len(named) :][:1]
            self.names.forget(block)
            del self.holds[int(block[0])]
            self.free.append(int(block[0]))


steps = st.one_of(st.tuples(st.sampled_from(["", "a", "b"]), texts), st.integers(0, 100))


@given(st.lists(steps, max_size=40))
@settings(max_examples=200, deadline=None)
def test_what_is_found_holds_exactly_these_tokens_behind_this_prefix(
    history: list[tuple[str, list[int]] | int],
) -> None:
    cache = Cache()
    for step in history:
        if isinstance(step, int):
            cache.forget(step)
        else:
            cache.run(*step)


@given(st.lists(st.tuples(texts, texts), min_size=2, max_size=6))
@settings(max_examples=100, deadline=None)
def test_rows_named_together_are_found_as_if_named_one_by_one(rows: list[tuple[list[int], list[int]]]) -> None:
    names = PrefixNames(NUM_BLOCKS, SIZE)
    parents, tokens = [], []
    block = 0
    for prompt, more in rows:
        whole = np.array(prompt[: len(prompt) // SIZE * SIZE], np.int32)
        found, node, _ = names.find(NO_SALT, whole)
        if missing := len(whole) // SIZE - len(found):
            blocks = np.arange(block + 1, block + 1 + missing, dtype=np.int32)
            block += missing
            node = names.name_run(node, whole[len(found) * SIZE :], blocks)
        parents.append(node)
        tokens.append(more[:SIZE])
    given_blocks = np.arange(block + 1, block + 1 + len(rows))
    if given_blocks[-1] > NUM_BLOCKS:
        return
    full = np.array(tokens, np.int32).view(np.dtype((np.void, 4 * SIZE))).reshape(-1)
    nodes = names.name_each(np.array(parents), full, given_blocks)
    for (prompt, more), node in zip(rows, nodes.tolist(), strict=True):
        text = prompt[: len(prompt) // SIZE * SIZE] + more[:SIZE]
        found, last, _ = names.find(NO_SALT, np.array(text, np.int32))
        assert len(found) == len(text) // SIZE
        assert last == node or names.named[node % (NUM_BLOCKS + 1)]


def test_a_child_that_took_another_name_is_not_believed() -> None:
    names = PrefixNames(NUM_BLOCKS, SIZE)
    names.name_run(NO_SALT, ids(1, 1, 2, 2), ids(1, 2))
    names.forget(ids(2))
    names.name_run(NO_SALT, ids(9, 9), ids(2))  # block 1 still points to it
    assert names.find(NO_SALT, ids(1, 1, 9, 9))[0] == [1]
    assert names.find(NO_SALT, ids(9, 9))[0] == [2]


def test_a_block_behind_an_evicted_one_is_not_found_even_when_its_prefix_returns() -> None:
    names = PrefixNames(NUM_BLOCKS, SIZE)
    names.name_run(NO_SALT, ids(1, 1, 2, 2), ids(1, 2))
    names.forget(ids(1))
    names.name_run(NO_SALT, ids(1, 1), ids(3))
    assert names.find(NO_SALT, ids(1, 1, 2, 2))[0] == [3]


def test_runs_that_are_named_together_are_found_apart() -> None:
    names = PrefixNames(NUM_BLOCKS, SIZE)
    root = names.name_run(NO_SALT, ids(1, 1), ids(1))
    texts = [(NO_SALT, ids(2, 2, 3, 3), ids(2, 3)), (root, ids(2, 2), ids(4)), (root, ids(3, 3, 4, 4), ids(5, 6))]
    nodes = names.name_runs([Run(node, names.find(node, text)[2], text, blocks) for node, text, blocks in texts])
    assert names.find(NO_SALT, ids(2, 2, 3, 3, 2, 2))[:2] == ([2, 3], nodes[0])
    assert names.find(NO_SALT, ids(1, 1, 2, 2, 3, 3))[:2] == ([1, 4], nodes[1])
    assert names.find(NO_SALT, ids(1, 1, 3, 3, 4, 4)) == ([1, 5, 6], nodes[2], NO_KEY)
    names.forget(ids(1, 2, 3, 4, 5, 6))
    assert not names.named.any()


@needs_plain_core
def test_equal_hashes_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixNames, "key", lambda self, parent, tokens: 7)
    names = PrefixNames(NUM_BLOCKS, SIZE)
    names.name_run(NO_SALT, ids(1, 1), ids(1))
    assert names.find(NO_SALT, ids(2, 2)) == ([], NO_SALT, 7)
    assert names.find(names.root("salt"), ids(1, 1))[0] == []
    names.name_run(NO_SALT, ids(2, 2), ids(2))
    assert names.find(NO_SALT, ids(2, 2))[0] == [2]
    assert names.find(NO_SALT, ids(1, 1))[0] == []  # replaced, which costs a hit and nothing else
    names.forget(ids(1))
    names.forget(ids(2))
    assert not names.named.any()


def test_a_salt_among_too_many_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_names, "MAX_SALTS", 2)
    names = PrefixNames(NUM_BLOCKS, SIZE)
    root = names.root("a")
    names.name_run(root, ids(1, 1), ids(1))
    names.root("b")
    assert names.root("a") == root
    names.root("c")
    names.root("d")
    assert names.find(names.root("a"), ids(1, 1))[0] == []
