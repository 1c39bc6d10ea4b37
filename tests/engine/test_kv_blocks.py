"""The block pool and the tables: nothing lost, nothing shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_blocks import KvBlocks


def test_every_block_can_be_used() -> None:
    """No block is set aside: a cache of 3 blocks of 4 holds 12 tokens."""
    blocks = KvBlocks(num_blocks=3, block_size=4)
    assert blocks.try_grow("a", 12)
    assert sorted(blocks.table("a")) == [0, 1, 2]
    assert blocks.usage == 1.0


def test_a_table_that_cannot_grow_stays_as_it_was() -> None:
    """A failed attempt takes no block, so that preemption can decide."""
    blocks = KvBlocks(num_blocks=3, block_size=4)
    assert blocks.try_grow("a", 8)
    assert not blocks.try_grow("b", 5)
    assert (blocks.table("b"), blocks.num_free) == ((), 1)
    blocks.check_integrity()


def test_a_table_keeps_its_blocks_while_it_grows() -> None:
    """KV already written stays where it is, and a table that does not grow is the same object."""
    blocks = KvBlocks(num_blocks=4, block_size=4)
    blocks.try_grow("a", 5)
    before = blocks.table("a")
    blocks.try_grow("a", 8)
    assert blocks.table("a") is before
    blocks.try_grow("a", 9)
    assert blocks.table("a")[:2] == before


def test_integrity_notices_a_leak_and_a_shared_block() -> None:
    """The check the other tests lean on does fail where it must."""
    blocks = KvBlocks(num_blocks=3, block_size=4)
    blocks.try_grow("a", 8)
    blocks._tables["b"] = blocks.table("a")[:1]
    with pytest.raises(AssertionError, match=r"held twice \[0\]"):
        blocks.check_integrity()
    blocks._tables = {}
    with pytest.raises(AssertionError, match=r"lost \[0, 1\]"):
        blocks.check_integrity()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 40)), max_size=60), st.integers(1, 12))
def test_any_order_of_growing_and_releasing_keeps_the_books(moves: list[tuple[str, int]], num_blocks: int) -> None:
    """Whatever requests do (0 stands for release), each block is free or in one table."""
    blocks = KvBlocks(num_blocks=num_blocks, block_size=4)
    for name, num_tokens in moves:
        if num_tokens == 0:
            blocks.release(name)
        elif blocks.try_grow(name, num_tokens):
            assert len(blocks.table(name)) >= blocks.blocks_for(num_tokens)
        blocks.check_integrity()
