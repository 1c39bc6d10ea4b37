"""How good the knee's answers are on drawn ladders: `python -m benchmarks.knees`, some two minutes.

Beside the detector stand rules that others use, on the same ladders: an answer's score is the share of the best power
on the ladder that it keeps, by the true curve.
"""

from __future__ import annotations

import argparse

import numpy as np

from tests.tuner.analysis.held_out import FAMILIES, GOOD_ENOUGH, Ladder, draw
from tuner.analysis.cross_checks import kneedle, ten_percent_per_doubling
from tuner.analysis.curve import FloatArray


def kept_by_rules(ladder: Ladder) -> dict[str, float]:
    """Share of the best power that each rule keeps on `ladder`; a rule that names no load keeps none."""
    order = np.argsort(ladder.loads)
    loads, measured = ladder.loads[order], ladder.measured[order]
    return {
        "detector": ladder.kept(),
        "largest power as measured": ladder.kept_at(float(loads[(5.5 * np.log(measured) - np.log(loads)).argmax()])),
        "Kneedle": ladder.kept_at(kneedle(loads, measured)),
        "10 % per doubling": ladder.kept_at(ten_percent_per_doubling(loads, measured)),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    print(f"Share of {len(seeds)} ladders whose answer keeps {GOOD_ENOUGH:.0%} of the best power (mean share kept)\n")
    for gaussian in (False, True):
        print("| each stage off by " + ("a deviation of 0-8 %" if gaussian else "0-8 % at most"), end=" ")
        rules: list[str] = []
        for family in FAMILIES:
            scores = [kept_by_rules(draw(family, seed, gaussian=gaussian)) for seed in seeds]
            if not rules:
                rules = list(scores[0])
                print("| " + " | ".join(rules) + " |\n" + "| --- " * (1 + len(rules)) + "|")
            print(f"| {family} | " + " | ".join(_cell(np.array([s[rule] for s in scores])) for rule in rules) + " |")
        print()


def _cell(kept: FloatArray) -> str:
    return f"{(kept >= GOOD_ENOUGH).mean():.1%} ({kept.mean():.3f})"


if __name__ == "__main__":
    main()
