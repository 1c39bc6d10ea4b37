"""How much one program of a kernel computes, and with how many warps: pure functions of shapes and the chip.

No autotuner: it needs a driver to measure with, makes the first request slow, and lets two launches of one engine
differ.
"""

from __future__ import annotations

from dataclasses import dataclass

FEWEST_ROWS_OF_A_DOT = 16
"""A matrix unit multiplies no fewer rows at once: below, rows are padding."""

MOST_SPLITS = 32
"""Parts a context is cut into at the most; each costs a partial result that is written and read again."""

FEWEST_KEYS_OF_A_SPLIT = 256
"""Below, starting a program costs more than its keys do."""

PROGRAMS_PER_SM = 4
"""So many programs of a decode keep an SM's loads in flight."""


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less: 80 is 128."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTile:
    """Whole rows a program reduces."""

    rows: int
    columns: int
    """Power of two, no less than the row."""

    num_warps: int


def row_tile(*, num_rows: int, row_size: int, num_sms: int) -> RowTile:
    """Of a norm: rows of a head are short and share a program, as long as every SM has two programs to run."""
    columns = next_power_of_2(row_size)
    rows = max(1, min(16, 2048 // columns))
    while rows > 1 and num_rows < 2 * num_sms * rows:
        rows //= 2
    return RowTile(rows=rows, columns=columns, num_warps=_warps(rows * columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementTile:
    """Columns of one row a program computes one by one."""

    columns: int
    num_warps: int


def element_tile(row_size: int) -> ElementTile:
    """Of an activation: wide rows are cut, so that few tokens still fill the chip."""
    columns = min(1024, next_power_of_2(row_size))
    return ElementTile(columns=columns, num_warps=_warps(2 * columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTile:
    """Heads of one token a program computes."""

    heads: int
    columns: int
    num_warps: int


def head_tile(*, num_heads: int, columns: int) -> HeadTile:
    """Of a rotation or a write: some 2048 numbers of one token."""
    columns = next_power_of_2(columns)
    heads = max(1, min(next_power_of_2(num_heads), 2048 // columns))
    return HeadTile(heads=heads, columns=columns, num_warps=_warps(heads * columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTile:
    """Queries by keys that a program multiplies."""

    rows: int
    """Queries times the query heads of one key/value head, padding included."""

    keys: int
    columns: int
    """Power of two, no less than the head size."""

    num_warps: int
    num_stages: int

    def queries(self, group: int) -> int:
        """How many queries the rows hold, where so many query heads share one key/value head."""
        return self.rows // group


def attention_tile(*, head_size: int, group: int, itemsize: int, is_decode: bool, is_fp8: bool) -> AttentionTile:
    """Of paged attention: a decode has one query a request, a prompt as many as the matrix unit likes.

    As large as compiles for sm_80 and sm_90 without spilling (docs/kernels.md): float32 has no matrix unit that keeps
    its precision, and float8 is widened in registers.

    Args:
        head_size: of keys and values.
        group: query heads that share one key/value head.
        itemsize: bytes of a query's number.
        is_decode: whether no request has more than one query.
        is_fp8: whether the cache is.
    """
    columns = next_power_of_2(head_size)
    rows = max(FEWEST_ROWS_OF_A_DOT, next_power_of_2(group))
    is_wide = columns > 128
    if itemsize == 4:
        return AttentionTile(
            rows=rows,
            keys=16,
            columns=columns,
            num_warps=(4 if is_fp8 else 16) if is_wide else 8,
            num_stages=1 if is_wide and is_fp8 else 2,
        )
    if is_decode:
        keys = (16 if is_fp8 else 32) if is_wide else 64
        num_warps = 8 if is_fp8 else 4
        return AttentionTile(rows=rows, keys=keys, columns=columns, num_warps=num_warps, num_stages=2 if is_wide else 3)
    rows = max(rows, 32 if is_wide else 64)
    return AttentionTile(
        rows=rows, keys=32 if is_wide else 64, columns=columns, num_warps=4 if is_wide else 8, num_stages=2
    )


def num_splits(*, num_tiles: int, num_kv_heads: int, most_keys: int, num_sms: int) -> int:
    """Into how many parts each context is cut, so that few requests with long contexts still fill the chip.

    Args:
        num_tiles: tiles of queries, over all requests.
        num_kv_heads: each is a program of its own.
        most_keys: no context is longer.
        num_sms: of the chip.
    """
    wanted = PROGRAMS_PER_SM * num_sms // max(1, num_tiles * num_kv_heads)
    room = most_keys // FEWEST_KEYS_OF_A_SPLIT
    return max(1, min(MOST_SPLITS, next_power_of_2(max(1, wanted)), next_power_of_2(max(1, room))))


def _warps(numbers: int) -> int:
    """A warp for every 512 numbers, 1 to 16."""
    return max(1, min(16, next_power_of_2(numbers // 512)))
