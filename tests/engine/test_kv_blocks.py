"""The block pool, the tables and the prefix cache: nothing lost, nothing shared by mistake."""

import pytest

from engine.kv_blocks import BlockPool, KvBlocks, chain_digest
from engine.request import Request, SamplingParams


def make_request(name: str, tokens: range) -> Request:
    """A request whose prompt is these tokens."""
    return Request(request_id=name, prompt_token_ids=tuple(tokens), sampling=SamplingParams(max_tokens=4))


def hold_all(blocks: KvBlocks, request: Request) -> tuple[int, ...]:
    """Look a request up and give it blocks for all its known tokens; its table."""
    prefix = blocks.cached_prefix(request)
    request.num_computed_tokens = len(prefix) * blocks.block_size
    blocks.begin(request, prefix)
    table = blocks.try_grow(request, request.num_known_tokens)
    blocks.check_integrity()
    assert table is not None
    return table


def test_every_block_can_be_used() -> None:
    """No block is set aside: a cache of 3 blocks of 4 holds 12 tokens."""
    blocks = KvBlocks(num_blocks=3, block_size=4)
    assert blocks.try_grow(make_request("a", range(12)), 12) == (0, 1, 2)
    assert blocks.table("a") == (0, 1, 2)
    assert blocks.usage == 1.0


def test_a_table_that_cannot_grow_stays_as_it_was() -> None:
    """A failed attempt takes no block, so that preemption can decide."""
    blocks = KvBlocks(num_blocks=3, block_size=4)
    assert blocks.try_grow(make_request("a", range(8)), 8)
    assert blocks.try_grow(make_request("b", range(8)), 5) is None
    assert (blocks.table("b"), blocks.num_free) == ((), 1)
    blocks.check_integrity()


def test_a_table_keeps_its_blocks_while_it_grows() -> None:
    """KV already written stays where it is, and a table that does not grow is the same object."""
    blocks = KvBlocks(num_blocks=4, block_size=4)
    request = make_request("a", range(9))
    before = blocks.try_grow(request, 5)
    assert before is not None
    assert blocks.try_grow(request, 8) is before
    grown = blocks.try_grow(request, 9)
    assert grown is not None
    assert grown[:2] == before


def test_integrity_notices_a_leak_a_shared_block_and_a_wrong_name() -> None:
    """The check the other tests lean on does fail where it must."""
    blocks = KvBlocks(num_blocks=3, block_size=4, enable_prefix_caching=True)
    table = hold_all(blocks, make_request("a", range(8)))
    blocks._tables["b"] = table[:1]
    with pytest.raises(AssertionError, match=r"blocks \[0\]: the tables differ from the counts"):
        blocks.check_integrity()
    del blocks._tables["b"]
    blocks._tables["a"] = (0, 0, 1)
    with pytest.raises(AssertionError, match="twice"):
        blocks.check_integrity()
    blocks._tables["a"] = table
    del blocks._pool._free[2]
    with pytest.raises(AssertionError, match=r"lost or in both \[2\]"):
        blocks.check_integrity()
    blocks._pool._free[2] = None
    blocks.check_integrity()
    blocks._pool._digests[0] = None
    with pytest.raises(AssertionError, match="cached KV blocks"):
        blocks.check_integrity()


def test_equal_prefixes_share_blocks_and_the_last_token_is_always_computed() -> None:
    """A prompt of 8 tokens that is cached as a whole hits one block of 4: its last token's scores are needed."""
    blocks = KvBlocks(num_blocks=8, block_size=4, enable_prefix_caching=True)
    first = hold_all(blocks, make_request("a", range(8)))
    assert blocks.cached_prefix(make_request("b", range(8))) == first[:1]
    assert blocks.cached_prefix(make_request("c", range(9))) == first
    assert blocks.cached_prefix(make_request("d", range(4))) == ()


def test_a_block_is_found_only_behind_the_tokens_it_was_computed_behind() -> None:
    """The same four tokens after another beginning have other keys and values: a hit would be a wrong answer."""
    blocks = KvBlocks(num_blocks=8, block_size=4, enable_prefix_caching=True)
    hold_all(blocks, make_request("a", range(8)))
    assert blocks.cached_prefix(make_request("b", range(4, 12))) == ()
    assert chain_digest(b"", (1, 2)) != chain_digest(b"", (2, 1))
    assert chain_digest(chain_digest(b"", (1,)), (2,)) != chain_digest(b"", (1, 2))


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    """One request's end takes nothing from another's context; and then the prefix can still be found."""
    blocks = KvBlocks(num_blocks=4, block_size=4, enable_prefix_caching=True)
    hold_all(blocks, make_request("a", range(6)))
    request = make_request("b", range(6))
    assert blocks.num_needed(6, blocks.cached_prefix(request)) == 1
    hold_all(blocks, request)
    blocks.release("a")
    blocks.check_integrity()
    assert blocks.num_free == 2
    blocks.release("b")
    blocks.check_integrity()
    assert (blocks.num_free, blocks.usage) == (4, 0.0)
    again = make_request("c", range(6))
    assert blocks.num_needed(6, blocks.cached_prefix(again)) == 2, "an idle hit is no longer free once it is hit"


def test_what_nobody_can_find_is_used_again_first_and_tails_go_before_heads() -> None:
    """A small cache keeps the beginnings that requests share for as long as it can."""
    blocks = KvBlocks(num_blocks=5, block_size=4, enable_prefix_caching=True)
    table = hold_all(blocks, make_request("a", range(10)))
    blocks.release("a")
    assert blocks.free_ids() == (table[2], 3, 4, table[1], table[0])
    assert blocks.cached_free_ids() == (table[1], table[0])
    hold_all(blocks, make_request("b", range(100, 113)))
    assert blocks.cached_prefix(make_request("c", range(10))) == (table[0],)


def test_the_copy_cached_first_is_found_until_it_is_evicted() -> None:
    """Of two blocks with one name the later serves when the first is gone."""
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.cache(first, b"name")
    pool.cache(second, b"name")
    assert pool.find(b"name") == first
    pool.give_back((first,))
    assert pool.take(1) == (first,)
    assert pool.find(b"name") == second
    pool.check_integrity([(first,), (second,)])


def test_the_prefix_cache_is_emptied_only_while_nobody_holds_blocks() -> None:
    """A reset between two measurements either forgets everything or says that it did not."""
    blocks = KvBlocks(num_blocks=4, block_size=4, enable_prefix_caching=True)
    hold_all(blocks, make_request("a", range(8)))
    assert not blocks.reset_prefix_cache()
    assert blocks.cached_prefix(make_request("b", range(9)))
    blocks.release("a")
    assert blocks.reset_prefix_cache()
    assert blocks.cached_prefix(make_request("b", range(9))) == ()
    blocks.check_integrity()


def test_without_prefix_caching_nothing_is_ever_found() -> None:
    """A user who turned it off gets no hit, and a released table comes back tail foremost."""
    blocks = KvBlocks(num_blocks=4, block_size=4)
    hold_all(blocks, make_request("a", range(12)))
    assert blocks.cached_prefix(make_request("b", range(12))) == ()
    blocks.release("a")
    assert (blocks.free_ids(), blocks.cached_free_ids()) == ((2, 1, 0, 3), ())
