"""Ladders whose curves, rungs and noise are drawn, and what an answer to one is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.tuner.analysis.curves import FloatArray, power
from tuner.analysis.knee import LadderPoint, find_knee
from tuner.answer import KneeFinding, LadderVerdict

FIRST_SEED, NUM_SEEDS = 900_000, 300
"""Ladders on which nothing was chosen."""

SHARE_OF_LADDERS = 0.95
MOST_NOISE = 0.08
GOOD_ENOUGH = 0.9
"""Share of the best power on the ladder that an answer must keep."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """One drawn ladder, in the order in which its stages were handed over."""

    loads: FloatArray
    truth: FloatArray
    measured: FloatArray
    preemptions: FloatArray
    """Expected counts; NaN where the engine has no counter."""

    noise: float
    """Standard deviation of a stage's relative error."""

    says_noise: bool
    """Whether the stages' intervals admit to the noise, or have none."""

    fence: float | None = None

    def points(self) -> list[LadderPoint]:
        """The ladder as the detector gets it."""
        return [
            LadderPoint(
                load=float(load),
                throughput=float(rate),
                throughput_half_width=1.96 * self.noise * float(rate) if self.says_noise else None,
                num_preemptions=None if np.isnan(count) else int(count),
            )
            for load, rate, count in zip(self.loads, self.measured, self.preemptions, strict=True)
        ]

    def finding(self, num_bootstrap: int = 1) -> KneeFinding:
        """What the detector says of it."""
        return find_knee(self.points(), fence=self.fence, num_bootstrap=num_bootstrap)

    def kept(self) -> float:
        """What the detector's answer is worth."""
        return self.kept_by(self.finding())

    def kept_by(self, finding: KneeFinding) -> float:
        """What an answer is worth; without a knee, the end of the ladder that the verdict points at."""
        match finding.verdict:
            case LadderVerdict.KNEE:
                return self.kept_at(finding.load)
            case LadderVerdict.ALREADY_SATURATED:
                return self.kept_at(float(self.loads.min()))
            case LadderVerdict.NOT_REACHED | LadderVerdict.FENCED:
                return self.kept_at(float(self.loads.max()))
            case _:
                return 0.0

    def best(self) -> float:
        """The load of most power by the true curve, of those that do not preempt."""
        return float(max(self.loads, key=self.kept_at))

    def true_verdict(self) -> LadderVerdict:
        """What the true curve is: a best stage at an end of the ladder is no knee."""
        best = self.best()
        if best == self.loads.min():
            return LadderVerdict.ALREADY_SATURATED
        if best < self.loads.max():
            return LadderVerdict.KNEE
        return LadderVerdict.NOT_REACHED if self.fence is None else LadderVerdict.FENCED

    def kept_at(self, load: float | None) -> float:
        """Power by the true curve at `load`, as a share of the best on the ladder.

        A stage that preempts is no answer, however much power it has; nor is no load.
        """
        clean = self.loads < self.loads[self.preemptions > 0].min(initial=np.inf)
        shares = power(self.loads[clean], self.truth[clean])
        return float(shares[self.loads[clean] == load].max(initial=0.0))


Truth = Callable[[FloatArray, np.random.Generator], tuple[FloatArray, FloatArray]]
"""Loads to true throughputs and preemption counts, for a curve whose bend lies on the ladder."""


def bend_on(loads: FloatArray, rng: np.random.Generator) -> float:
    """A load to bend at, between the second stage and the last but one."""
    return float(np.exp(rng.uniform(np.log(loads[1]), np.log(loads[-2]))))


def unknown(loads: FloatArray) -> FloatArray:
    """Preemption counts of an engine that has no counter."""
    return np.full(loads.size, np.nan)


def batch(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """X = N / (a + bN), the knee at 4.5 a / b."""
    return loads / (bend_on(loads, rng) / 4.5 + loads), unknown(loads)


def capped(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """The same, which stops gaining at a load left of its own knee."""
    cap = bend_on(loads, rng)
    own_knee = cap * np.exp(rng.uniform(0, np.log(20)))
    served = np.minimum(loads, cap)
    return served / (own_knee / 4.5 + served), unknown(loads)


def many_servers(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Closed M/M/c with think time Z: exact mean-value analysis, one customer more at a time.

    With p(j | n) the chance of j customers at the servers when there are n in all, and m(j) = min(j, c) of them served,
    R(n) = S sum_j (j + 1) / m(j + 1) p(j | n - 1) and X(n) = n / (R + Z); then p(j | n) = X S / m(j) p(j - 1 | n - 1).
    p(0 | n) = p(0 | n - 1) X Z / n, as n customers that only think would complete n / Z (Reiser, 1981): one minus the
    rest would lose all digits.
    """
    servers, think, service = max(1, round(bend_on(loads, rng))), rng.uniform(0.05, 2), 1.0
    most = int(loads[-1])
    number = np.arange(1, most + 1)
    slowed = number / np.minimum(number, servers)
    here = np.zeros(most + 1)
    here[0] = 1.0
    rates = np.empty(most)
    for n in range(1, most + 1):
        rates[n - 1] = n / (service * float(slowed[:n] @ here[:n]) + think)
        none = here[0] * rates[n - 1] * think / n
        here[1 : n + 1] = rates[n - 1] * service * here[:n] * slowed[:n] / number[:n]
        here[0] = none
    return rates[loads.astype(int) - 1], unknown(loads)


def scalability_law(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Gunther's law with its peak between the second stage and three times the last."""
    contention = rng.uniform(0.001, 0.05)
    peak = np.exp(rng.uniform(np.log(loads[1]), np.log(3 * loads[-1])))
    crosstalk = (1 - contention) / peak**2
    return loads / (1 + contention * (loads - 1) + crosstalk * loads * (loads - 1)), unknown(loads)


def cliff(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """A batch server whose KV cache is full from some load on: preemptions start, and throughput falls by 2 to 7.5."""
    edge = bend_on(loads, rng)
    rates = loads / (4 * edge * rng.uniform(0.2, 2) / 4.5 + loads)
    fallen = rates.max() / rng.uniform(2, 7.5)
    over = loads > edge
    counts = np.where(over, 10 + np.rint(20 * loads / edge), 0)
    return np.where(over, np.minimum(rates, fallen * (edge / loads) ** 0.2), rates), counts.astype(float)


def silent_cliff(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """The same on an engine that does not count preemptions."""
    return cliff(loads, rng)[0], unknown(loads)


FAMILIES: dict[str, Truth] = {
    "batch server": batch,
    "batch server with a cap": capped,
    "closed M/M/c": many_servers,
    "scalability law": scalability_law,
    "KV cliff": cliff,
    "KV cliff, no counter": silent_cliff,
}


def draw(family: str, seed: int, *, gaussian: bool = False) -> Ladder:
    """One ladder of 5 to 14 whole loads from 1 to some 500, unevenly spaced and shuffled, each stage off by up to 8 %.

    A ladder's noise is drawn from 0 to 8 %; each stage is off by that much at most, or, where `gaussian`, by that
    standard deviation, which is 1.7 times as much.
    """
    rng = np.random.default_rng([seed, list(FAMILIES).index(family)])
    loads = stepping(rng)
    return measured(loads, *FAMILIES[family](loads, rng), rng, gaussian=gaussian)


def measured(
    loads: FloatArray,
    truth: FloatArray,
    preemptions: FloatArray,
    rng: np.random.Generator,
    *,
    gaussian: bool,
    fence: float | None = None,
) -> Ladder:
    """The ladder of a true curve under noise, shuffled."""
    noise = rng.uniform(0, MOST_NOISE)
    off = rng.standard_normal(loads.size) if gaussian else rng.uniform(-1, 1, loads.size)
    noise_sd = noise if gaussian else noise / np.sqrt(3)
    rates = 1000 * truth * (1 + noise * np.clip(off, -4, 4))
    order = rng.permutation(loads.size)
    says_noise = bool(rng.integers(2))
    return Ladder(loads[order], truth[order], rates[order], preemptions[order], noise_sd, says_noise, fence)


def stepping(rng: np.random.Generator) -> FloatArray:
    """Steps of a factor of 1.25 to 3, as drawn for each gap on its own."""
    num_stages = int(rng.integers(5, 15))
    widest = min(3.0, 512 ** (1 / (num_stages - 1)))
    loads = [float(rng.integers(1, 9))]
    while len(loads) < num_stages:
        loads.append(max(loads[-1] + 1, float(np.rint(loads[-1] * rng.uniform(1.25, widest)))))
    return np.array(loads)


def share_good(drawn: Callable[[int], Ladder]) -> float:
    """Share of ladders whose answer is good enough."""
    return sum(drawn(FIRST_SEED + i).kept() >= GOOD_ENOUGH for i in range(NUM_SEEDS)) / NUM_SEEDS
