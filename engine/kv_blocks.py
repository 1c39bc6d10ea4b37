"""KV blocks as integers: which are free, and which request holds which, in order. No tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise


class BlockPool:
    """The free blocks of a cache of `num_blocks`.

    Every block can be handed out: unlike vLLM, which sets its block 0 aside, there is no null block here.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks nobody holds. Unit: blocks."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Hand out `count` blocks from the front of the free queue; the caller has checked `num_free`."""
        return tuple(self._free.popleft() for _ in range(count))

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Put a table's blocks at the front of the free queue, its tail foremost (vLLM's order without prefix hits)."""
        self._free.extendleft(block_ids)

    def free_ids(self) -> list[int]:
        """The free blocks, the next to be handed out first."""
        return list(self._free)


class KvBlocks:
    """The block table of every request that holds KV.

    Each block is, at any time, either free or in exactly one table; `check_integrity` says so.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, tuple[int, ...]] = {}

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
        """Share of the blocks that requests hold, from 0 to 1."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take, the last one perhaps in part. Unit: blocks."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> tuple[int, ...]:
        """The request's blocks in order; the same tuple until the table grows."""
        return self._tables.get(request_id, ())

    def try_grow(self, request_id: str, num_tokens: int) -> bool:
        """Make the table hold `num_tokens` tokens; False, and nothing changes, if too few blocks are free."""
        table = self._tables.get(request_id, ())
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > self._pool.num_free:
            return False
        self._tables[request_id] = table + self._pool.take(missing)
        return True

    def release(self, request_id: str) -> None:
        """Free all the request's blocks; nothing happens if it holds none."""
        self._pool.give_back(self._tables.pop(request_id, ()))

    def check_integrity(self) -> None:
        """Check that no block is lost, shared or free twice.

        Raises:
            AssertionError: naming the blocks concerned.
        """
        seen = sorted([*self._pool.free_ids(), *(block for table in self._tables.values() for block in table)])
        if seen == list(range(self.num_blocks)):
            return
        lost = sorted(set(range(self.num_blocks)) - set(seen))
        double = sorted({block for block, following in pairwise(seen) if block == following})
        raise AssertionError(f"every KV block is free or in one table: lost {lost}, held twice {double}")
