"""A closed loop: users who wait for their answers, so that the load is their number whatever the server does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from time import perf_counter
from types import TracebackType
from typing import Self

from tuner.load.client import retry_after_s
from tuner.load.connection import Endpoint, Exchange
from tuner.load.log import LoadLog
from tuner.load.prompts import Conversation
from tuner.load.sender import Draft, Sender

_PAUSE_AFTER_FAILURE_S = 0.2
"""A user whose request failed or was refused waits this long: a dead server is not hammered."""

_MOST_PATIENCE_S = 5.0
"""A user waits no longer than this before it comes back, however long a refusal asks it to: a stage is short."""


class ClosedLoop:
    """`load` users, each of whom sends a request when the previous one has ended, and perhaps thinks before.

    Without a thought the next request leaves in the very call that saw the answer's end. Writing out further prompts
    and reading answers come after, one at a time with a look at all sockets in between: done on the way, they would
    make every user whose answer ends at the same time wait for all others' paperwork.

    An async context manager: leaving it closes the sockets of requests in flight, so that the engine drops them,
    and records those as unfinished. There is no cap on connections.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        model: str,
        load: int,
        prompts: Iterator[Conversation],
        think_times_s: Iterator[float] | None = None,
    ) -> None:
        self._sender = Sender(endpoint, model)
        self._prompts = prompts
        self._think_times_s = repeat(0.0) if think_times_s is None else think_times_s
        self._load = load
        self._num_ended = [0] * load
        self._drafts: deque[Draft] = deque()
        self._has_paperwork = asyncio.Event()

    @property
    def log(self) -> LoadLog:
        """What was seen so far."""
        return self._sender.log

    @property
    def load(self) -> int:
        """Number of users."""
        return self._load

    @property
    def num_users_through(self) -> int:
        """Users whose first request has ended."""
        return sum(ended > 0 for ended in self._num_ended)

    def check(self) -> None:
        """Go on, or raise what the generator died of: one that sends nothing any more looks like an idle engine."""
        self._sender.check()

    @property
    def is_done(self) -> bool:
        """Never: users always have another question."""
        return False

    async def __aenter__(self) -> Self:
        # Connected and written out beforehand, so that the first sends do not queue behind each other.
        await self._sender.keep_ready(self._load)
        self._drafts.extend(self._new_draft() for _ in range(self._load))
        self._sender.start()
        for user in range(self._load):
            self._send(user, self._next_draft(), self.log.origin_s)
        self._sender.run(self._do_paperwork())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._sender.stop()

    def _new_draft(self) -> Draft:
        return self._sender.draft(next(self._prompts))

    def _next_draft(self) -> Draft:
        return self._drafts.popleft() if self._drafts else self._new_draft()

    def _send(self, user: int, draft: Draft, intended_s: float | None) -> None:
        self._sender.send(draft, intended_s=intended_s, on_end=partial(self._ended, user))
        self._has_paperwork.set()

    def _ended(self, user: int, draft: Draft, exchange: Exchange) -> None:
        self._num_ended[user] += 1
        self._has_paperwork.set()
        if not exchange.succeeded or exchange.ended_s is None:
            self._sender.run(self._come_back(user, exchange))
            return
        think_s = next(self._think_times_s)
        if think_s or draft.request.has_next_turn:
            self._sender.run(self._go_on(user, draft, exchange, exchange.ended_s + think_s))
        else:
            self._send(user, self._next_draft(), exchange.ended_s)

    async def _go_on(self, user: int, draft: Draft, exchange: Exchange, due_s: float) -> None:
        """Read the answer where the next turn repeats it, think, and send."""
        following = self._sender.next_draft(draft, exchange)
        await self._sender.think_until(due_s + (following.request.think_s if following else 0.0))
        self._send(user, following or self._next_draft(), None)

    async def _come_back(self, user: int, exchange: Exchange) -> None:
        """After a failure or a refusal: wait as long as the server asked, within bounds, and begin anew."""
        patience_s = max(retry_after_s(exchange) or 0.0, _PAUSE_AFTER_FAILURE_S)
        await asyncio.sleep(min(patience_s, _MOST_PATIENCE_S))
        self._send(user, self._next_draft(), perf_counter())

    async def _do_paperwork(self) -> None:
        """Keep a draft in stock for every user and read answers; between any two the event loop sees to its sockets."""
        while True:
            if len(self._drafts) < self._load:
                self._drafts.append(self._new_draft())
                await asyncio.sleep(0)
            if self._sender.read_some():
                await asyncio.sleep(0)
            elif len(self._drafts) >= self._load:
                self._has_paperwork.clear()
                await self._has_paperwork.wait()
