"""CSV with a row a stage. Columns carry their units in their names; a near spelling is refused, not guessed at.

`concurrency` or `request_rate`, and `output_throughput`; where present `p95_ttft_ms`, `p95_itl_ms`, `p95_e2e_ms`,
`num_preemptions`, `request_throughput`, `mean_e2e_ms`, `num_completed`, `num_failed`. An empty cell is unknown. Other
columns are not read.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.elsewhere.stage import Axis, ElsewhereStage
from tuner.inputs import InputError

COLUMNS = (
    "concurrency",
    "request_rate",
    "output_throughput",
    "p95_ttft_ms",
    "p95_itl_ms",
    "p95_e2e_ms",
    "num_preemptions",
    "request_throughput",
    "mean_e2e_ms",
    "num_completed",
    "num_failed",
)

_SAME_WORD = {
    "e2el": "e2e",
    "95": "p95",
    "95th": "p95",
    "percentile": "",
    "concurrent": "concurrency",
    "preemption": "preemptions",
    "num": "",
    "max": "",
    "requests": "",
    "per": "",
    "avg": "mean",
}
_UNITS = ("ms", "s", "sec", "seconds", "us", "second", "rps", "toks", "tok", "tokens")
_STATISTIC = re.compile(r"p\d+|mean|median|std|min|max|avg")
_SPELLINGS = {
    "concurrency": ("users", "num_users", "clients", "batch_size", "num_concurrent_requests", "streams", "load"),
    "request_rate": ("rate", "rps", "qps", "rate_rps", "request_rate_rps", "offered_rate"),
    "output_throughput": (
        "throughput",
        "tps",
        "tok_s",
        "tokens_s",
        "tokens_per_second",
        "output_tokens_per_second",
        "output_tok_s",
        "output_token_throughput",
    ),
    "num_preemptions": ("preemptions_total", "num_preemptions_total"),
}


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by column; separated by comma, semicolon or tab.

    Raises:
        InputError: for an empty file, a column that occurs twice, or a row of another length than the header.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    header = next(iter(text.splitlines()), "")
    if not header.strip():
        raise InputError(f"{path}: empty: the first line must name the columns, such as concurrency,output_throughput")
    separator = max(",;\t", key=header.count)
    rows = list(csv.reader(io.StringIO(text), delimiter=separator, skipinitialspace=True))
    names = [name.strip() for name in rows[0]]
    for name in names:
        if name and names.count(name) > 1:
            raise InputError(f"{path}: the column {name!r} occurs twice")
    found = []
    for number, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(names):
            raise InputError(f"{path}: row {number} has {len(row)} cells, the header {len(names)}")
        found.append({name: cell.strip() for name, cell in zip(names, row, strict=True)})
    return found or [dict.fromkeys(names, "")]


def stages(path: Path, rows: Sequence[Mapping[str, str]]) -> list[ElsewhereStage]:
    """One stage a row.

    Raises:
        InputError: for a missing, misspelt or second load column, and for a cell that is no number.
    """
    names = list(rows[0])
    _refuse_near_spellings(path, names)
    axis = _axis(path, names, rows)
    _require(path, "output_throughput", names)
    filled = [(number, row) for number, row in enumerate(rows, start=2) if any(row.values())]
    return [_stage(path, number, row, axis) for number, row in filled]


def _stage(path: Path, number: int, row: Mapping[str, str], axis: Axis) -> ElsewhereStage:
    where = f"{path}: row {number}"
    values = {name: _number(where, name, row[name]) for name in COLUMNS if name in row}
    load, throughput = values[axis.value], values["output_throughput"]
    if load is None or not load > 0:
        raise InputError(f"{where}: {axis.value} is {row[axis.value]!r}, it must be above 0")
    for name, value in values.items():
        if value is not None and value < 0:
            raise InputError(f"{where}: {name} is {row[name]}, it cannot be below 0")
    return ElsewhereStage(
        source=where,
        axis=axis,
        load=load,
        output_throughput=math.nan if throughput is None else throughput,
        request_throughput_rps=_finite(values.get("request_throughput")),
        mean_e2e_ms=_finite(values.get("mean_e2e_ms")),
        ttft_p95_ms=_finite(values.get("p95_ttft_ms")),
        itl_p95_ms=_finite(values.get("p95_itl_ms")),
        e2e_p95_ms=_finite(values.get("p95_e2e_ms")),
        num_preemptions=_count(values.get("num_preemptions")),
        num_completed=_count(values.get("num_completed")),
        num_failed=_count(values.get("num_failed")),
    )


def _axis(path: Path, names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Axis:
    """Which of the two load columns is filled."""
    there = [axis for axis in Axis if axis.value in names]
    filled = [axis for axis in there if any(row[axis.value] for row in rows)]
    if len(filled) > 1:
        raise InputError(
            f"{path}: both concurrency and request_rate are filled: a ladder has one kind of load, so remove the other"
        )
    if not there:
        _require(path, "concurrency", names, otherwise=" (or 'request_rate')")
    return (filled or there)[0]


def _require(path: Path, column: str, names: Sequence[str], *, otherwise: str = "") -> None:
    if column in names:
        return
    known = {other: name for name in (column, "request_rate") for other in _SPELLINGS.get(name, ())}
    meant = [f"; rename {name!r} to {known[name.lower()]!r}?" for name in names if name.lower() in known]
    raise InputError(
        f"{path}: the column {column!r}{otherwise} is missing{meant[0] if meant else ''} It has: {', '.join(names)}"
    )


def _refuse_near_spellings(path: Path, names: Sequence[str]) -> None:
    for name in names:
        meant = None if name in COLUMNS else _meant(name)
        if meant is not None and meant not in names:
            raise InputError(f"{path}: unknown column {name!r}; did you mean {meant!r}? (units are part of the name)")


def _meant(name: str) -> str | None:
    """The column that a name is a near spelling of: the same words in another order or unit, or a letter off."""
    for column in COLUMNS:
        if name.lower() in _SPELLINGS.get(column, ()) or _words(name) == _words(column):
            return column
    near = difflib.get_close_matches(name.lower(), COLUMNS, n=1, cutoff=0.88)
    same_statistic = bool(near) and _STATISTIC.findall(name.lower()) == _STATISTIC.findall(near[0])
    # Another statistic or another side of the traffic is another figure, however close its name is.
    return near[0] if same_statistic and ("input" in name.lower()) is ("input" in near[0]) else None


def _words(name: str) -> frozenset[str]:
    words = [_SAME_WORD.get(word, word) for word in re.split(r"[^a-z0-9]+", name.lower())]
    return frozenset(word for word in words if word and word not in _UNITS)


def _number(where: str, column: str, cell: str) -> float | None:
    if cell.lower() in ("", "na", "n/a", "nan", "none", "null", "-"):
        return None
    try:
        return float(cell)
    except ValueError:
        raise InputError(f"{where}: {column} is {cell!r}, not a number (write 1234.5)") from None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _count(value: float | None) -> int | None:
    return round(value) if value is not None and math.isfinite(value) else None
