"""The valves: how much the engine takes in before it refuses with 503, and when to come back.

Both count over all cores, in the server's process (vLLM: `vllm/v1/engine/async_llm.py`, `check_admission`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig

VALVES = ("max_num_queued_reqs", "max_num_queued_tokens")
"""Their names are also the reasons that `vllm:admission_rejections_total` counts."""

_WINDOW_S = 10.0
_LONGEST_RETRY_S = 60


@dataclass(frozen=True, slots=True)
class Overload:
    """Why nothing more is taken in now."""

    valve: str
    message: str
    retry_after_s: int
    """When there may be room, by the rate of the last seconds; at least 1."""


class RecentRate:
    """How much a second of something, over the last ten seconds that saw any."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, amount: int, *, now_s: float) -> None:
        """Count `amount` now."""
        self._events.append((now_s, amount))
        self._total += amount
        self._forget(now_s)

    def seconds_for(self, amount: int, *, now_s: float) -> int:
        """Whole seconds that `amount` takes at this rate, from 1 to 60; 1 where no rate is known."""
        self._forget(now_s)
        if not self._events:
            return 1
        span_s = max(1.0, now_s - self._events[0][0])
        return min(_LONGEST_RETRY_S, max(1, math.ceil(amount * span_s / self._total)))

    def _forget(self, now_s: float) -> None:
        while self._events and self._events[0][0] < now_s - _WINDOW_S:
            self._total -= self._events.popleft()[1]


class Valves:
    """Counts what is in flight and in prefill, and says when that is enough."""

    def __init__(self, config: EngineConfig) -> None:
        self._max_requests = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._completions = RecentRate()
        self._prefills = RecentRate()
        self.num_requests = 0
        """In flight: waiting or running. Unit: requests."""

        self.num_prefill_tokens = 0
        """Prompts of requests that have no token yet. Unit: tokens."""

    def never(self, num_requests: int) -> str | None:
        """Why so many requests at once can never be taken in; None if they can."""
        if self._max_requests is None or num_requests <= self._max_requests:
            return None
        return (
            f"{num_requests} requests at once are more than max_num_queued_reqs={self._max_requests}: "
            "ask for fewer prompts or a smaller n"
        )

    def try_enter(self, prompt_lens: Sequence[int], *, now_s: float) -> Overload | None:
        """Take in requests with prompts of these lengths, all or none; says why none were.

        As in vLLM the tokens in prefill decide, not those that come: the last to enter may pass that limit, so that no
        prompt is too long for ever.
        """
        overload = self._too_many_requests(len(prompt_lens), now_s) or self._too_many_tokens(now_s)
        if overload is None:
            self.num_requests += len(prompt_lens)
            self.num_prefill_tokens += sum(prompt_lens)
        return overload

    def note_first_token(self, prompt_len: int, *, now_s: float) -> None:
        """A prompt has left prefill."""
        self.num_prefill_tokens -= prompt_len
        self._prefills.add(prompt_len, now_s=now_s)

    def note_end(self, prompt_len: int, *, in_prefill: bool, now_s: float) -> None:
        """A request is over, or its client has left; `in_prefill`: it never had a token."""
        self.num_requests -= 1
        if in_prefill:
            self.num_prefill_tokens -= prompt_len
        self._completions.add(1, now_s=now_s)

    def _too_many_requests(self, num_new: int, now_s: float) -> Overload | None:
        limit = self._max_requests
        if limit is None or self.num_requests + num_new <= limit:
            return None
        return Overload(
            "max_num_queued_reqs",
            f"the engine is full: {self.num_requests} requests in flight and {num_new} more would pass "
            f"max_num_queued_reqs={limit}; try again later",
            self._completions.seconds_for(self.num_requests + num_new - limit, now_s=now_s),
        )

    def _too_many_tokens(self, now_s: float) -> Overload | None:
        limit, held = self._max_tokens, self.num_prefill_tokens
        if limit is None or held < limit:
            return None
        return Overload(
            "max_num_queued_tokens",
            f"the engine is full: {held} prompt tokens in prefill have reached max_num_queued_tokens={limit}; "
            "try again later",
            self._prefills.seconds_for(held - limit + 1, now_s=now_s),
        )
