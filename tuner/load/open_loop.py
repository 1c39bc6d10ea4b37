"""An open loop: requests leave when their time has come, whatever the server does; and a batch, all at once.

What a send needs is made ready before: the bytes, and a connection. Between two sends the loop makes more of both and
reads what has ended, a little at a time. Latencies count from the intended time, so a late send is not hidden; a later
turn of a conversation has none: it follows a person's pause.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from time import perf_counter
from types import TracebackType
from typing import Self

from tuner.load.connection import Endpoint, Exchange
from tuner.load.log import LoadLog
from tuner.load.prompts import Conversation
from tuner.load.sender import Draft, Sender

_MOST_DRAFTS = 256
_MOST_DRAFT_BYTES = 64 * 2**20
_CONNECTIONS_AHEAD = 32
"""Open and idle: so many requests may leave at one moment without a handshake before them."""

_CONNECT_EVERY_S = 0.02
_CONNECT_AHEAD_S = 1.0

_CHORE_S = 0.002
"""No chore is begun closer than this to the next send: writing a long prompt or reading a long answer takes as long."""

_TIMER_S = 0.002
"""Timers of the event loop are whole milliseconds: they wake it this much before the send."""

_THREAD_S = 0.0002
"""A thread sleeps on until so shortly before it, the rest is waited out in turns of the loop: turning for milliseconds
would take a core, which an engine on the same machine may need."""


class OpenLoop:
    """Sends one conversation's first request at each given time, and its later turns when their answers allow it.

    An async context manager: leaving it closes the sockets of requests in flight and records those as unfinished.
    There is no cap on connections or on requests in flight.
    """

    def __init__(
        self, *, endpoint: Endpoint, model: str, prompts: Iterator[Conversation], times_s: Iterator[float]
    ) -> None:
        self._sender = Sender(endpoint, model)
        self._prompts = prompts
        self._times_s = times_s
        self._ready: deque[tuple[float, Draft]] = deque()
        self._ready_bytes = 0
        self._is_sent = False
        self._num_open = 0

    @property
    def log(self) -> LoadLog:
        """What was seen so far."""
        return self._sender.log

    def check(self) -> None:
        """Go on, or raise what the generator died of: one that sends nothing any more looks like an idle engine."""
        self._sender.check()

    @property
    def is_done(self) -> bool:
        """Whether all there was to send has been sent and has ended."""
        return self._is_sent and self._num_open == 0

    async def __aenter__(self) -> Self:
        while self._can_prepare() and self._prepare():
            pass
        await self._sender.keep_ready(min(len(self._ready), _CONNECTIONS_AHEAD))
        self._sender.start()
        self._sender.run(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._sender.stop()

    def _can_prepare(self) -> bool:
        return len(self._ready) < _MOST_DRAFTS and self._ready_bytes < _MOST_DRAFT_BYTES

    def _prepare(self) -> bool:
        time_s = next(self._times_s, None)
        conversation = next(self._prompts, None)
        if time_s is None or conversation is None:
            return False
        draft = self._sender.draft(conversation)
        self._ready.append((time_s, draft))
        self._ready_bytes += len(draft.payload)
        return True

    async def _run(self) -> None:
        self._sender.run(self._keep_connected())
        while self._ready or self._prepare():
            time_s, draft = self._ready.popleft()
            self._ready_bytes -= len(draft.payload)
            due_s = self.log.origin_s + time_s
            await self._wait_until(due_s)
            self._send(draft, due_s)
        self._is_sent = True
        while True:
            await asyncio.sleep(_CHORE_S)
            self._sender.read_some()

    async def _wait_until(self, due_s: float) -> None:
        """Do chores until the time is near, then wait for it."""
        while (left_s := due_s - perf_counter()) > 0:
            if left_s > _CHORE_S and (self._sender.read_some() or (self._can_prepare() and self._prepare())):
                await asyncio.sleep(0)
            elif left_s > 2 * _TIMER_S:
                await asyncio.sleep(left_s - _TIMER_S)
            elif left_s > _THREAD_S:
                await asyncio.to_thread(time.sleep, left_s - _THREAD_S)
            else:
                await asyncio.sleep(0)

    def _send(self, draft: Draft, due_s: float | None) -> None:
        self._num_open += 1
        self._sender.send(draft, intended_s=due_s, on_end=self._ended)

    def _ended(self, draft: Draft, exchange: Exchange) -> None:
        if draft.request.has_next_turn and exchange.ended_s is not None:
            self._sender.run(self._go_on(draft, exchange, exchange.ended_s))
        else:
            self._num_open -= 1

    async def _go_on(self, draft: Draft, exchange: Exchange, ended_s: float) -> None:
        """Read the answer, think, and send the next turn, if one can follow."""
        following = self._sender.next_draft(draft, exchange)
        if following is not None:
            await self._sender.think_until(ended_s + following.request.think_s)
            self._send(following, None)
        self._num_open -= 1

    async def _keep_connected(self) -> None:
        """Replace connections as requests take them."""
        while True:
            await asyncio.sleep(_CONNECT_EVERY_S)
            soon_s = self.log.now_s() + _CONNECT_AHEAD_S
            num_due = sum(time_s <= soon_s for time_s, _ in islice(self._ready, _CONNECTIONS_AHEAD))
            await self._sender.keep_ready(max(1, num_due))
