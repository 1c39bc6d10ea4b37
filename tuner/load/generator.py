"""All requests of a stage: a closed loop of users, and what the sender saw of them and of itself."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from tuner.load.client import completion_bytes, read_completion
from tuner.load.connection import Connection, Endpoint, Exchange, connect
from tuner.load.workload import PromptRequest
from tuner.records import RequestRecord

_PAUSE_AFTER_FAILURE_S = 0.2
"""A user whose request failed or was refused waits this long: a dead server is not hammered."""

_LAG_PROBE_S = 0.05

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class LoadLog:
    """What a load generator has seen so far. Times in seconds from its first send."""

    origin_s: float = 0.0
    """The first send, by `perf_counter`."""

    records: list[RequestRecord] = field(default_factory=list)
    """In the order in which requests ended."""

    sent_prompt_tokens: dict[int, int] = field(default_factory=dict)
    """Prompt length by request index, as it was sent."""

    event_times_s: array[float] = field(default_factory=lambda: array("d"))
    """When stream events arrived: a live meter for progress and steadiness; figures come from `records`."""

    in_flight_steps: list[tuple[float, int]] = field(default_factory=list)
    """(time, requests in flight from then on)."""

    loop_lags: list[tuple[float, float]] = field(default_factory=list)
    """(time, how late the event loop woke a sleeper)."""

    num_in_flight: int = 0

    def now_s(self) -> float:
        """Seconds since the first send."""
        return perf_counter() - self.origin_s

    def note_events(self, at_s: float, num_events: int) -> None:
        """Count stream events that arrived in one read."""
        if num_events == 1:
            self.event_times_s.append(at_s - self.origin_s)
        else:
            self.event_times_s.extend([at_s - self.origin_s] * num_events)

    def events_since(self, at_s: float) -> Floats:
        """When stream events arrived from then on: a copy of the meter's end, however long the meter is."""
        return np.array(self.event_times_s[bisect_left(self.event_times_s, at_s) :])

    def note_flight(self, change: int) -> None:
        """A request took off (+1) or ended (-1)."""
        self.num_in_flight += change
        self.in_flight_steps.append((self.now_s(), self.num_in_flight))

    def mean_in_flight(self, start_s: float, end_s: float) -> float:
        """Time average of requests in flight over a window, by integration."""
        area = 0.0
        ends = [at_s for at_s, _ in self.in_flight_steps[1:]] + [end_s]
        for (at_s, count), until_s in zip(self.in_flight_steps, ends, strict=False):
            area += count * max(0.0, min(until_s, end_s) - max(at_s, start_s))
        return area / (end_s - start_s)


@dataclass(slots=True)
class _User:
    connection: Connection | None
    sent: tuple[PromptRequest, Exchange] | None = None
    """What is in flight."""

    num_ended: int = 0


class ClosedLoop:
    """`load` users, each of whom sends a request the moment the previous one ended.

    The next request leaves in the very call that saw the answer's end. Writing out further prompts and reading answers
    come after, one at a time with a look at all sockets in between: done on the way, they would make every user whose
    answer ends at the same time wait for all others' paperwork.

    An async context manager: leaving it closes the sockets of requests in flight, so that the engine drops them,
    and records those as unfinished. There is no cap on connections.
    """

    def __init__(self, *, endpoint: Endpoint, model: str, load: int, prompts: Iterator[PromptRequest]) -> None:
        self.log = LoadLog()
        self._endpoint = endpoint
        self._model = model
        self._prompts = prompts
        self._load = load
        self._users: list[_User] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._drafts: deque[tuple[PromptRequest, bytes]] = deque()
        self._unread: deque[tuple[PromptRequest, Exchange]] = deque()
        """Ended, and not yet turned into a record."""

        self._has_paperwork = asyncio.Event()

    @property
    def num_users_through(self) -> int:
        """Users whose first request has ended."""
        return sum(user.num_ended > 0 for user in self._users)

    async def __aenter__(self) -> Self:
        # Connected and written out beforehand, so that the first sends do not queue behind each other.
        connections = await asyncio.gather(*(self._try_connect() for _ in range(self._load)))
        self._drafts.extend(self._draft() for _ in range(self._load))
        self._users = [_User(None if isinstance(found, str) else found) for found in connections]
        self.log.origin_s = perf_counter()
        for user in self._users:
            self._send(user, self.log.origin_s)
        self._start(self._do_paperwork())
        self._start(self._probe_lag())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now_s = perf_counter()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        in_flight = [user.sent for user in self._users if user.sent is not None]
        for user in self._users:
            user.sent = None
            if user.connection is not None:
                user.connection.abort()
        for sent in (*self._unread, *in_flight):
            self._read(sent, now_s)
        for result in ended:
            if isinstance(result, Exception):
                raise result

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)

    def _draft(self) -> tuple[PromptRequest, bytes]:
        request = next(self._prompts)
        return request, completion_bytes(request, endpoint=self._endpoint, model=self._model)

    async def _try_connect(self) -> Connection | str:
        try:
            connection = await connect(self._endpoint, self.log.note_events)
        except OSError as error:
            return f"no connection to {self._endpoint.host}:{self._endpoint.port}: {error}"
        return connection if connection.is_open else "the server closed the connection at once"

    def _send(self, user: _User, intended_s: float) -> None:
        """Send the user's next request now, or begin to connect."""
        if user.connection is None or not user.connection.is_open:
            self._start(self._send_on_new_connection(user, intended_s))
            return
        request, payload = self._next_draft()
        exchange, _ = user.connection.start(payload, intended_s=intended_s, on_end=partial(self._ended, user))
        user.sent = request, exchange
        self.log.note_flight(+1)
        self._has_paperwork.set()

    def _ended(self, user: _User, exchange: Exchange) -> None:
        """An answer has ended, well or badly; called by the connection."""
        if user.sent is None:
            return
        self._unread.append(user.sent)
        user.sent = None
        user.num_ended += 1
        self.log.note_flight(-1)
        if exchange.succeeded and exchange.ended_s is not None:
            self._send(user, exchange.ended_s)
        else:
            self._has_paperwork.set()
            self._start(self._send_after_pause(user))

    async def _send_after_pause(self, user: _User) -> None:
        await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
        self._send(user, perf_counter())

    async def _send_on_new_connection(self, user: _User, intended_s: float) -> None:
        outcome = await self._try_connect()
        if isinstance(outcome, Connection):
            user.connection = outcome
            self._send(user, intended_s)
            return
        now_s = perf_counter()
        request, _ = self._next_draft()
        self._unread.append((request, Exchange(intended_s=intended_s, sent_s=now_s, ended_s=now_s, fault=outcome)))
        self._has_paperwork.set()
        user.num_ended += 1
        await self._send_after_pause(user)

    def _next_draft(self) -> tuple[PromptRequest, bytes]:
        return self._drafts.popleft() if self._drafts else self._draft()

    async def _do_paperwork(self) -> None:
        """Keep a draft in stock for every user and read answers; between any two the event loop sees to its sockets."""
        while True:
            if len(self._drafts) < self._load:
                self._drafts.append(self._draft())
                await asyncio.sleep(0)
            if self._unread:
                self._read(self._unread.popleft(), perf_counter())
                await asyncio.sleep(0)
            elif len(self._drafts) >= self._load:
                self._has_paperwork.clear()
                await self._has_paperwork.wait()

    def _read(self, sent: tuple[PromptRequest, Exchange], now_s: float) -> None:
        request, exchange = sent
        record = read_completion(exchange, request, origin_s=self.log.origin_s, now_s=now_s)
        self.log.records.append(record)
        self.log.sent_prompt_tokens[request.index] = len(request.prompt_token_ids)

    async def _probe_lag(self) -> None:
        due_s = perf_counter()
        while True:
            due_s = max(due_s + _LAG_PROBE_S, perf_counter())
            await asyncio.sleep(due_s - perf_counter())
            self.log.loop_lags.append((self.log.now_s(), perf_counter() - due_s))
