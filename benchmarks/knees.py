"""How good the knee's answers are on drawn ladders: `python -m benchmarks.knees`, some five minutes.

Beside the detector stand rules that others use, on the same ladders: an answer's score is the share of the best power
on the ladder that it keeps, by the true curve. A verdict is wrong where it is not the true curve's, however close the
best stage is to an end of the ladder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import numpy as np

from tests.tuner.analysis.curves import FloatArray
from tests.tuner.analysis.harder import HARDER, NO_KNEE, draw_harder
from tests.tuner.analysis.held_out import FAMILIES, GOOD_ENOUGH, Ladder, Truth, draw
from tuner.analysis.cross_checks import kneedle, ten_percent_per_doubling

NUM_BOOTSTRAP = 200
Rule = Callable[[FloatArray, FloatArray], float | None]

TABLES: dict[str, tuple[Callable[..., Ladder], dict[str, Truth]]] = {
    "held-out": (draw, FAMILIES),
    "harder": (draw_harder, HARDER),
    "no-knee": (draw_harder, NO_KNEE),
}
RULES: dict[str, Rule] = {
    "largest power as measured": lambda loads, rates: float(loads[(5.5 * np.log(rates) - np.log(loads)).argmax()]),
    "Kneedle": kneedle,
    "10 % per doubling": ten_percent_per_doubling,
}


def scores(ladder: Ladder) -> dict[str, float]:
    """What the table says of one ladder; NaN where the detector names no knee and so no interval."""
    finding = ladder.finding(NUM_BOOTSTRAP)
    order = np.argsort(ladder.loads)
    loads, measured = ladder.loads[order], ladder.measured[order]
    low, high = finding.interval or (np.nan, np.nan)
    return {
        "detector": ladder.kept_by(finding),
        "wrong verdict": float(finding.verdict is not ladder.true_verdict()),
        "best load in the interval": np.nan if np.isnan(low) else float(low <= ladder.best() <= high),
        **{name: ladder.kept_at(rule(loads, measured)) for name, rule in RULES.items()},
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=900_000)
    parser.add_argument("--table", choices=TABLES, action="append", help="all where not given")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    print(f"Share of {len(seeds)} ladders whose answer keeps {GOOD_ENOUGH:.0%} of the best power (mean share kept)")
    for table in arguments.table or TABLES:
        drawn, families = TABLES[table]
        for gaussian in (False, True):
            noise = "a deviation of 0-8 %" if gaussian else "0-8 % at most"
            _print_table(f"{table}, each stage off by {noise}", families, drawn, seeds, gaussian=gaussian)


def _print_table(
    title: str, families: Iterable[str], drawn: Callable[..., Ladder], seeds: range, *, gaussian: bool
) -> None:
    names = ["detector", "wrong verdict", "best load in the interval", *RULES]
    print(f"\n| {title} | " + " | ".join(names) + " |\n" + "| --- " * (1 + len(names)) + "|")
    for family in families:
        rows = [scores(drawn(family, seed, gaussian=gaussian)) for seed in seeds]
        cells = [_cell(name, np.array([row[name] for row in rows])) for name in names]
        print(f"| {family} | " + " | ".join(cells) + " |", flush=True)


def _cell(name: str, values: FloatArray) -> str:
    if name == "wrong verdict":
        return f"{values.mean():.1%}"
    if name == "best load in the interval":
        known = values[~np.isnan(values)]
        return f"{known.mean():.1%} of {known.size}" if known.size else "-"
    return f"{(values >= GOOD_ENOUGH).mean():.1%} ({values.mean():.3f})"


if __name__ == "__main__":
    main()
