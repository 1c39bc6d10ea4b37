"""Cells and tables: what sections are made of."""

from __future__ import annotations

from typing import NamedTuple

from tuner import wording
from tuner.records import Estimate


class Cell(NamedTuple):
    """A figure, and below it in small print its interval or what else qualifies it."""

    text: str
    note: str = ""


class Table(NamedTuple):
    """Column heads and rows; the first cell of a row names it."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def cell(estimate: Estimate, unit: str) -> Cell:
    """A figure with its interval below it, both in the unit given."""
    return Cell(f"{wording.number(estimate.value)} {unit}", wording.interval(estimate, wording.number))
