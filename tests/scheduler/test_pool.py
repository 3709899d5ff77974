"""Reference counts, names, and the order in which cached blocks are given up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_scheduler.pool import BlockPool, HostPool
from pagemill_scheduler.prefix_names import NO_SALT
from pagemill_shared.schema import Int32Array

SIZE = 4


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, SIZE)


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def tokens_of(blocks: int, first: int = 0) -> Int32Array:
    return np.arange(first, first + blocks * SIZE, dtype=np.int32)


def test_block_zero_is_never_handed_out() -> None:
    pool = pool_of(5)
    assert sorted(pool.allocate(5).tolist()) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_more_than_there_are_is_refused() -> None:
    pool = pool_of(2)
    with pytest.raises(RuntimeError, match="1 more blocks asked for than are unused"):
        pool.allocate(3)


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    pool = pool_of(3)
    table = pool.allocate(2)
    pool.share(table)
    pool.release([table])
    assert pool.num_free == 1
    pool.release([table])
    assert pool.num_free == 3


def test_two_tables_that_share_blocks_can_be_released_together() -> None:
    pool = pool_of(4)
    first = pool.allocate(2)
    pool.share(first[:1])
    second = np.concatenate([first[:1], pool.allocate(1)])
    pool.release([first, second])
    assert pool.num_free == 4
    assert not pool.refs.any()


def test_a_block_is_not_given_back_twice() -> None:
    pool = pool_of(3)
    table = pool.allocate(2)
    pool.release([table])
    with pytest.raises(RuntimeError, match="nobody refers to them"):
        pool.release([table])


def named(pool: BlockPool, count: int, first: int = 0, root: int = NO_SALT) -> Int32Array:
    """A table of ``count`` named blocks, in use."""
    table = pool.allocate(count)
    pool.names.name_run(root, tokens_of(count, first), table)
    return table


def test_a_named_block_is_found_while_in_use_and_when_it_is_free() -> None:
    pool = pool_of(4)
    table = named(pool, 2)
    assert pool.names.find(NO_SALT, tokens_of(3))[0] == table.tolist()
    pool.release([table])
    assert (pool.num_free, pool.num_evictable, pool.num_used) == (4, 2, 0)
    blocks, _, _ = pool.names.find(NO_SALT, tokens_of(2))
    pool.share(np.array(blocks, np.int32))
    assert (pool.num_free, pool.num_evictable, pool.num_used) == (2, 0, 2)


def test_a_block_is_found_only_behind_the_same_tokens_and_salt() -> None:
    pool = pool_of(8)
    named(pool, 2)
    other = tokens_of(2)
    other[0] += 1
    assert pool.names.find(NO_SALT, other)[0] == []
    assert pool.names.find(NO_SALT, tokens_of(1, first=SIZE))[0] == []
    assert pool.names.find(pool.names.root("pepper"), tokens_of(2))[0] == []
    salted = named(pool, 1, root=pool.names.root("pepper"))
    assert pool.names.find(pool.names.root("pepper"), tokens_of(2))[0] == salted.tolist()


def test_the_first_block_with_a_name_keeps_it() -> None:
    pool = pool_of(4)
    first = named(pool, 1)
    second = named(pool, 1)
    assert pool.names.find(NO_SALT, tokens_of(1))[0] == first.tolist()
    pool.release([second])
    assert pool.num_evictable == 0


def test_unused_blocks_go_before_cached_ones_and_those_least_recently_used_first() -> None:
    pool = pool_of(6)
    old, new = named(pool, 2, first=100), named(pool, 2, first=200)
    pool.release([old])
    pool.release([new])
    pool.allocate(2)
    assert pool.num_evictable == 4
    # The end of a sequence goes before its beginning, which more requests may share.
    pool.allocate(1)
    assert pool.names.find(NO_SALT, tokens_of(2, 100))[0] == [old[0]]
    pool.allocate(2)
    assert pool.names.find(NO_SALT, tokens_of(2, 100))[0] == []
    assert pool.names.find(NO_SALT, tokens_of(2, 200))[0] == [new[0]]


def test_a_hit_makes_a_block_recently_used() -> None:
    pool = pool_of(2)
    old, new = named(pool, 1, first=100), named(pool, 1, first=200)
    pool.release([old])
    pool.release([new])
    pool.share(old)
    pool.release([old])
    pool.allocate(1)
    assert pool.names.find(NO_SALT, tokens_of(1, 100))[0] == old.tolist()
    assert pool.names.find(NO_SALT, tokens_of(1, 200))[0] == []


def test_what_was_withdrawn_is_found_no_more() -> None:
    pool = pool_of(4)
    table = named(pool, 2)
    pool.withdraw(table[:1])
    assert pool.names.find(NO_SALT, tokens_of(2))[0] == []
    pool.release([table])
    assert pool.num_free == 4
    again = named(pool, 2)
    assert pool.names.find(NO_SALT, tokens_of(2))[0] == again.tolist()


def test_a_free_block_that_is_withdrawn_can_be_handed_out() -> None:
    pool = pool_of(2)
    table = named(pool, 2)
    pool.release([table])
    pool.withdraw(table)
    assert (pool.num_evictable, pool.num_free) == (0, 2)
    assert sorted(pool.allocate(2).tolist()) == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.lists(st.integers(0, 1), max_size=12)), max_size=60))
def test_against_a_dict_of_whole_prefixes(steps: list[tuple[int, int, list[int]]]) -> None:
    """Allocate, name, share, release in any order: hits are exactly those of a dict from whole prefixes to blocks."""
    pool = pool_of(7)
    held: list[Int32Array] = []
    known: dict[tuple[int, ...], int] = {}
    for action, count, tokens in steps:
        if action < 2:
            prefix = np.array(tokens[: len(tokens) // SIZE * SIZE], np.int32)
            blocks, node, _ = pool.names.find(NO_SALT, prefix)
            expected = [known.get(tuple(prefix[: (i + 1) * SIZE].tolist())) for i in range(len(prefix) // SIZE)]
            expected = expected[: expected.index(None)] if None in expected else expected
            assert blocks == expected
            pool.share(np.array(blocks, np.int32))
            table = np.array(blocks, np.int32)
            fresh = len(prefix) // SIZE - len(blocks)
            if fresh and fresh <= pool.num_free:
                table = np.concatenate([table, pool.allocate(fresh)])
                known = {name: block for name, block in known.items() if block not in table[len(blocks) :]}
                pool.names.name_run(node, prefix[len(blocks) * SIZE :], table[len(blocks) :])
                for i in range(len(blocks), len(table)):
                    known[tuple(prefix[: (i + 1) * SIZE].tolist())] = int(table[i])
            if len(table):
                held.append(table)
        elif action == 2 and held:
            pool.release([held.pop(count % len(held))])
        elif count <= pool.num_free:
            table = pool.allocate(count)
            known = {name: block for name, block in known.items() if block not in table}
            held.append(table)
        assert pool.num_used + pool.num_free == pool.num_blocks
        assert set(pool.evictable_blocks()) <= set(known.values())


def test_host_blocks_that_a_plan_still_reads_are_written_by_the_next_one() -> None:
    pool = HostPool(3)
    blocks = pool.allocate(2).tolist()
    pool.release(blocks, after_plan=True)
    assert (pool.num_free, pool.num_available) == (3, 1)
    with pytest.raises(RuntimeError, match="2 host blocks asked for, 1 available"):
        pool.allocate(2)
    pool.plan_made()
    assert pool.num_available == 3
