"""The safe rate on queues whose true p95 is known: shown, or not named. The whole table: `benchmarks/safe_rates.py`."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.queues import QUEUES, true_p95_s
from benchmarks.safe_rates import answers, holds

MM1, SIXTEEN, ENGINE = 0, 1, 2


def test_the_queue_is_the_textbooks() -> None:
    """Truth must be true: waits of M/M/1 beyond t have probability rho exp(-(1 - rho) t); p95 at 0.8 is 13.9."""
    assert true_p95_s(QUEUES[MM1], 0.8) == pytest.approx(np.log(0.8 / 0.05) / 0.2 + 0.1, rel=0.08)


@pytest.mark.parametrize("share", [0.8, 0.9, 0.95])
def test_a_short_stage_near_capacity_claims_nothing(share: float) -> None:
    """120 requests of a few busy periods held the true p95 in 22, 3 and 0 of 100 stages; now they have no interval."""
    found = [holds((MM1, share, 120, seed)) for seed in range(40)]
    assert sum(each is None for each in found) >= 38


def test_an_interval_holds_the_truth() -> None:
    """Where there is one, it must not be narrower than it says."""
    found = [holds((MM1, 0.5, 1500, seed)) for seed in range(60)]
    told = [each for each in found if each is not None]
    assert len(told) >= 50
    assert np.mean([inside for inside, _ in told]) >= 0.88


@pytest.mark.parametrize(("queue", "share"), [(MM1, 0.8), (SIXTEEN, 0.7), (ENGINE, 0.8)])
def test_a_rate_called_safe_is_safe(queue: int, share: float) -> None:
    """87 of 100 answers were above the limit: users who deployed at them missed it."""
    found = [answers((queue, "tune", share, seed))[0] for seed in range(10)]
    named = [rate for rate in found if rate is not None]
    assert len(named) >= 8
    assert sum(rate > 1 for rate in named) <= 1
    assert np.median(named) > 0.5
