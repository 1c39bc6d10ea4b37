"""What a figure is called where people read it."""

from __future__ import annotations

import pytest

from tuner import wording
from tuner.answer import SafeRateFigure

SEEN = "20 requests/s (offered 20.5, sent 20.1)"


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (20.0, 25.0, f"{SEEN}; 25 was not shown to be safe"),
        (20.0, None, f"{SEEN}; the highest that was tried"),
        (18.0, 25.0, f"{SEEN}, 18 by a launch that is slower, as launches here differ; 25 was not shown to be safe"),
    ],
)
def test_a_safe_rate_says_what_was_seen_and_what_another_holds(low: float, high: float | None, said: str) -> None:
    """Who deploys the rate of a lucky launch learns at night that the next one was slower."""
    rate = SafeRateFigure(value=20.0, low=low, high=high, num_samples=90, offered_rps=20.5, sent_rps=20.1)
    assert wording.safe_rate(rate) == said
