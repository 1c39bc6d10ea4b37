"""KV blocks as integers: which are free, which request holds which, and which still hold a known prefix. No tensors.

The order in which blocks are handed out and forgotten is vLLM's (`vllm/v1/core/block_pool.py`), so that a small cache
hits and misses at the same places.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine.request import Request


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name a full block by its tokens and, through its parent's digest, by every token before them.

    A cached block is found by this name alone, and a wrong find would answer one user from another's text. So the name
    is SHA-256, for which nobody can make two prefixes that share one, and not Python's `hash`, where anybody can.

    Args:
        parent: the digest of the block before; empty for a request's first block.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """The blocks of a cache: how many requests hold each, the free ones in order, and the names of the cached ones.

    A cached block is a full one that can be found by its digest. It stays so when nobody holds it any more, until it is
    handed out again. Two blocks may bear one digest, when equal prompts were computed apart.

    Every block can be handed out: unlike vLLM, which sets its block 0 aside, there is no null block here.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, list[int]] = {}
        # Used as a queue from whose middle a block that is hit can be taken in constant time.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached ones included. Unit: blocks."""
        return len(self._free)

    def find(self, digest: bytes) -> int | None:
        """The block of that name which was cached first; None if there is none."""
        blocks = self._cached.get(digest)
        return blocks[0] if blocks else None

    def is_idle(self, block: int) -> bool:
        """Whether nobody holds the block."""
        return self._num_holders[block] == 0

    def take(self, count: int) -> tuple[int, ...]:
        """Hand out `count` blocks from the front of the free queue; the caller has checked `num_free`."""
        taken = tuple([self._free.popitem(last=False)[0] for _ in range(count)])
        for block in taken:
            self._num_holders[block] = 1
            self.forget(block)
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to cached blocks; those that were free no longer are."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._free[block]
            self._num_holders[block] += 1

    def give_back(self, table: Sequence[int]) -> None:
        """Take one holder off each of a table's blocks; those it was the last holder of are free.

        A block nobody can find goes to the front of the free queue, to be used again first. A cached one goes to the
        back, a table's tail before its head: what ends a prefix is forgotten before what begins it.
        """
        cached: list[int] = []
        for block in table:
            self._num_holders[block] -= 1
            if self._num_holders[block] > 0:
                continue
            if self._digests[block] is not None:
                cached.append(block)
                continue
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        self._free.update(dict.fromkeys(reversed(cached)))

    def cache(self, block: int, digest: bytes) -> None:
        """Name a held block that has no name yet, so that it can be found."""
        self._digests[block] = digest
        self._cached.setdefault(digest, []).append(block)

    def forget(self, block: int) -> None:
        """Take a block's name away, so that it is found no more; nothing happens if it has none."""
        digest = self._digests[block]
        if digest is None:
            return
        self._digests[block] = None
        same = self._cached[digest]
        same.remove(block)
        if not same:
            del self._cached[digest]

    def clear(self) -> None:
        """Forget every digest."""
        self._digests = [None] * self.num_blocks
        self._cached.clear()

    def free_ids(self) -> tuple[int, ...]:
        """The free blocks, the next to be handed out first."""
        return tuple(self._free)

    def cached_free_ids(self) -> tuple[int, ...]:
        """Those of the free blocks that can still be found, in the same order."""
        return tuple(block for block in self._free if self._digests[block] is not None)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Check that no block is lost, that holders are counted right, and that names and blocks match both ways.

        Args:
            tables: the block tables of all requests.

        Raises:
            AssertionError: naming the blocks concerned.
        """
        holders = Counter(block for table in tables for block in set(table))
        wrong = [block for block in range(self.num_blocks) if self._num_holders[block] != holders[block]]
        if wrong:
            raise AssertionError(f"holders of KV blocks {wrong}: the tables differ from the counts")
        misplaced = [block for block in range(self.num_blocks) if (block in self._free) != (holders[block] == 0)]
        if misplaced or len(self._free) + len(holders) != self.num_blocks:
            raise AssertionError(f"every KV block is either free or in a table: lost or in both {misplaced}")
        named = {block: digest for block, digest in enumerate(self._digests) if digest is not None}
        found = [(block, digest) for digest, blocks in self._cached.items() for block in blocks]
        if len(found) != len(named) or dict(found) != named or not all(self._cached.values()):
            raise AssertionError(f"cached KV blocks: digests find {found}, the blocks are named {named}")


class KvBlocks:
    """The block table of every request that holds KV, and the prefix cache.

    Each block is, at any time, either free or in a table; only cached blocks, which are full and never written again,
    are in several. `check_integrity` says so.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool = False) -> None:
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, tuple[int, ...]] = {}
        self._not_computed_yet: list[int] = []

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole cache. Unit: blocks."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds. Unit: blocks."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, from 0 to 1; a cached block that nobody holds counts as free."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take, the last one perhaps in part. Unit: blocks."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> tuple[int, ...]:
        """The request's blocks in order; the same tuple until the table grows."""
        return self._tables.get(request_id, ())

    def cached_prefix(self, request: Request) -> tuple[int, ...]:
        """The cached blocks that the request's known tokens begin with, in order.

        Never all of its tokens: at least the last has to be computed, to draw the next from it, and blocks are hit as
        a whole.
        """
        if not self._enable_prefix_caching:
            return ()
        prefix: list[int] = []
        for index in range((request.num_known_tokens - 1) // self.block_size):
            block = self._pool.find(self._digest(request, index))
            if block is None:
                break
            prefix.append(block)
        return tuple(prefix)

    def num_needed(self, num_tokens: int, prefix: Sequence[int]) -> int:
        """Free blocks it takes to hold `num_tokens` tokens that begin with a cached prefix. Unit: blocks.

        Hit blocks that nobody holds are free now, and are not once they are hit.
        """
        num_idle = sum(self._pool.is_idle(block) for block in prefix)
        return self.blocks_for(num_tokens) - len(prefix) + num_idle

    def begin(self, request: Request, prefix: tuple[int, ...]) -> None:
        """Begin the request's table with a cached prefix; `num_computed_tokens` must say as much."""
        if prefix:
            self._pool.hold(prefix)
            self._tables[request.request_id] = prefix

    def try_grow(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Make the table hold the request's first `num_tokens` tokens, known ones that a step is about to compute.

        Blocks that these tokens fill are cached from now on: a request in the same step may already share them, since
        every layer writes a step's keys and values before it reads any.

        Returns:
            The table; None, and nothing changes, if too few blocks are free.
        """
        table = self._tables.get(request.request_id, ())
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > 0:
            if missing > self._pool.num_free:
                return None
            table += self._pool.take(missing)
            self._tables[request.request_id] = table
        if self._enable_prefix_caching:
            for index in range(request.num_computed_tokens // self.block_size, num_tokens // self.block_size):
                self._pool.cache(table[index], self._digest(request, index))
                self._not_computed_yet.append(table[index])
        return table

    def end_step(self, *, is_computed: bool) -> None:
        """Say whether the step was computed that the blocks cached since the last one were for; if not, forget them."""
        if not is_computed:
            for block in self._not_computed_yet:
                self._pool.forget(block)
        self._not_computed_yet.clear()

    def release(self, request_id: str) -> None:
        """Give back all the request's blocks; nothing happens if it holds none."""
        self._pool.give_back(self._tables.pop(request_id, ()))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing changes, while any request holds blocks."""
        if self._pool.num_free < self._pool.num_blocks:
            return False
        self._pool.clear()
        return True

    def free_ids(self) -> tuple[int, ...]:
        """The free blocks, the next to be handed out first."""
        return self._pool.free_ids()

    def cached_free_ids(self) -> tuple[int, ...]:
        """Those of the free blocks that still hold a cached prefix, in the same order."""
        return self._pool.cached_free_ids()

    def check_integrity(self) -> None:
        """Check that no block is lost or free while held, and that counts and names are right.

        Raises:
            AssertionError: naming the blocks concerned.
        """
        self._pool.check_integrity(self._tables.values())
        for request_id, table in self._tables.items():
            if len(set(table)) < len(table):
                raise AssertionError(f"{request_id} holds a KV block twice: {table}")

    def _digest(self, request: Request, index: int) -> bytes:
        """The digest of the request's full block `index`; digests are kept, since known tokens never change."""
        digests = request.block_digests
        for missing in range(len(digests), index + 1):
            start = missing * self.block_size
            tokens = request.known_tokens(start, start + self.block_size)
            digests.append(chain_digest(digests[-1] if digests else b"", tokens))
        return digests[index]
