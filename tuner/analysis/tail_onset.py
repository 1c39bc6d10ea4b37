"""Where a latency's tail starts to rise faster than the load that is put on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def tail_onset(name: str, series: Sequence[tuple[float, float | None]]) -> list[str]:
    """The first step where a p95 rises clearly faster than the load."""
    known = [(load, value) for load, value in series if value is not None and math.isfinite(value) and value > 0]
    for (low, before), (high, after) in pairwise(known):
        if math.log(after) - math.log(before) > math.log(high) - math.log(low) + math.log(1.1):
            return [f"p95 {name} rises faster than load from {low:g} to {high:g}: {before:.4g} to {after:.4g} ms"]
    return []
