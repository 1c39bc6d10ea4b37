"""The load generators' results as Markdown: medians over rounds, `not given` for what a tool does not say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from load_generator import Cell, Result

_METRICS = ("mean", "p95", "p99")
WORST_ITL_ERROR = 0.01
LEAST_SHARE = 0.95


def relative_error(reported: float | None, true: float | None) -> float | None:
    """(reported - true) / true; None where one is not known."""
    return None if reported is None or not true else reported / true - 1


def passes(cell: Cell) -> bool:
    """Whether the tool's mean inter-token latency is right within 1 %, at 95 % of the offered load or more.

    A client that is late with its next request lowers the load, and can then well be right about what is left of it.
    """
    error = relative_error(None if cell.reported is None else cell.reported.itl_ms.mean, cell.itl_ms.mean)
    held = cell.chunks_per_s >= LEAST_SHARE * cell.offered_chunks_per_s
    return held and error is not None and abs(error) <= WORST_ITL_ERROR


def markdown(result: Result) -> str:
    """All tables, and what to know of the run."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    lines = [
        f"{result.created}, {result.machine}; load average {'; '.join(map('{:.1f}'.format, result.load_average))}.",
        f"{versions}.",
        *(f"{name} was left out: {reason}" for name, reason in result.left_out.items()),
        *_accuracy(result.cells),
        *_ceilings(result.cells),
        *_odd(result.cells),
    ]
    return "\n".join(lines)


def _accuracy(cells: Sequence[Cell]) -> Iterator[str]:
    measured = [cell for cell in cells if cell.part in ("closed", "poisson")]
    if not measured:
        return
    yield from ("", "Reported minus true, medians over rounds; TTFT 200 ms, ITL 50 ms, 40 tokens.", "")
    heads = [*(f"TTFT {name}" for name in _METRICS), *(f"ITL {name}" for name in _METRICS)]
    yield from _head("client", "load", *heads, "in flight", "µs a chunk", "waited for its core")
    for key in dict.fromkeys((cell.part, cell.streams, cell.tool) for cell in measured):
        own = [cell for cell in measured if (cell.part, cell.streams, cell.tool) == key]
        per_request = any(map(_is_per_request, own))
        errors = [_error(own, "ttft_ms", name) for name in _METRICS]
        for name in _METRICS:
            given = name == "mean" or not per_request
            errors.append(_error(own, "itl_ms", name) if given else "not given (per request only)")
        flights = _middle(own, lambda cell: cell.mean_in_flight)
        cost = _middle(own, lambda cell: cell.cpu_us_per_chunk)
        waited = _middle(own, lambda cell: cell.waited_share)
        yield _row(
            key[2], f"{key[0]} {key[1]}", *errors, _text(flights, ".1f"), _text(cost, ".0f"), _text(waited, ".0%")
        )


def _is_per_request(cell: Cell) -> bool:
    return cell.reported is not None and cell.reported.itl_of == "requests"


def _error(cells: Iterable[Cell], field: str, name: str) -> str:
    errors = [
        error
        for cell in cells
        if cell.reported is not None
        and (error := relative_error(getattr(getattr(cell.reported, field), name), getattr(getattr(cell, field), name)))
        is not None
    ]
    return f"{median(errors):+.1%}" if errors else "not given"


def _ceilings(cells: Sequence[Cell]) -> Iterator[str]:
    measured = [cell for cell in cells if cell.part == "ceiling"]
    if not measured:
        return
    yield from (
        "",
        "Chunks a second (ITL 20 ms, 200 tokens, closed loop) at 95 % of the load or more, mean ITL within 1 %.",
        "",
    )
    yield from _head(
        "client", "good at", "ITL p99 there", "µs a chunk", "not at", "ITL mean there", "share of the load there"
    )
    for tool in dict.fromkeys(cell.tool for cell in measured):
        own = [cell for cell in measured if cell.tool == tool]
        good = [cell for cell in own if passes(cell)]
        best = max(good, key=lambda cell: cell.chunks_per_s, default=None)
        above = [cell for cell in own if best is None or cell.streams > best.streams]
        worse = min(above, key=lambda cell: cell.streams, default=None)
        yield _row(
            tool,
            "-" if best is None else f"{best.chunks_per_s:.0f}/s",
            "-" if best is None or _is_per_request(best) else _error([best], "itl_ms", "p99"),
            "-" if best is None else _text(best.cpu_us_per_chunk, ".0f"),
            "not reached" if worse is None else f"{worse.offered_chunks_per_s:.0f}/s",
            "-" if worse is None else _error([worse], "itl_ms", "mean"),
            "-" if worse is None else f"{worse.chunks_per_s / worse.offered_chunks_per_s:.0%}",
        )


def _odd(cells: Sequence[Cell]) -> Iterator[str]:
    measured = [cell for cell in cells if cell.part == "odd"]
    if not measured:
        return
    yield from ("", "Odd streams: every fourth answer is odd (packed: all are, 4 tokens a chunk).", "")
    yield from _head("client", "answers", "ended badly by the server", "said to have failed", "TTFT mean", "ITL mean")
    for cell in measured:
        said = "no result"
        if cell.reported is not None:
            failed, completed = cell.reported.num_failed, cell.reported.num_completed
            said = "not given" if failed is None or completed is None else f"{failed} of {failed + completed}"
        num_all = cell.num_ended + cell.num_ended_badly
        errors = (_error([cell], field, "mean") for field in ("ttft_ms", "itl_ms"))
        yield _row(cell.tool, cell.mode, f"{cell.num_ended_badly} of {num_all}", said, *errors)


def _middle(cells: Iterable[Cell], value: Callable[[Cell], float | None]) -> float | None:
    known = [found for cell in cells if (found := value(cell)) is not None]
    return median(known) if known else None


def _text(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _head(*names: str) -> tuple[str, str]:
    return _row(*names), _row(*("---" for _ in names))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
