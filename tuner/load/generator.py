"""All requests of a stage: a closed loop of users, and what the sender saw of them and of itself."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Self

from tuner.load.client import completion_bytes, read_completion
from tuner.load.connection import Connection, Endpoint, Exchange, connect
from tuner.load.workload import PromptRequest
from tuner.records import RequestRecord

_PAUSE_AFTER_FAILURE_S = 0.2
"""A user whose request failed or was refused waits this long: a dead server is not hammered."""

_LAG_PROBE_S = 0.05


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
        at_s -= self.origin_s
        for _ in range(num_events):
            self.event_times_s.append(at_s)

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
    draft: tuple[PromptRequest, bytes]
    """The next request, made while the last one was in flight."""

    unread: list[tuple[PromptRequest, Exchange]] = field(default_factory=list)
    """Sent, and not yet turned into a record."""

    num_ended: int = 0


class ClosedLoop:
    """`load` users, each of whom sends a request the moment the previous one ended.

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
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_users_through(self) -> int:
        """Users whose first request has ended."""
        return sum(user.num_ended > 0 for user in self._users)

    async def __aenter__(self) -> Self:
        # Connected and written out beforehand, so that the first sends do not queue behind each other.
        connections = await asyncio.gather(*(self._try_connect() for _ in range(self._load)))
        self._users = [
            _User(connection=None if isinstance(connection, str) else connection, draft=self._draft())
            for connection in connections
        ]
        self.log.origin_s = perf_counter()
        self._tasks = [asyncio.create_task(self._run_user(user)) for user in self._users]
        self._tasks.append(asyncio.create_task(self._probe_lag()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now_s = perf_counter()
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for user in self._users:
            self._read(user, now_s)
            if user.connection is not None:
                user.connection.abort()
        for result in ended:
            if isinstance(result, Exception):
                raise result

    def _draft(self) -> tuple[PromptRequest, bytes]:
        request = next(self._prompts)
        return request, completion_bytes(request, endpoint=self._endpoint, model=self._model)

    async def _try_connect(self) -> Connection | str:
        try:
            connection = await connect(self._endpoint, self.log.note_events)
        except OSError as error:
            return f"no connection to {self._endpoint.host}:{self._endpoint.port}: {error}"
        return connection if connection.is_open else "the server closed the connection at once"

    async def _run_user(self, user: _User) -> None:
        intended_s = self.log.origin_s
        while True:
            exchange = await self._send(user, intended_s)
            user.num_ended += 1
            if exchange.succeeded and exchange.ended_s is not None:
                intended_s = exchange.ended_s
            else:
                self._read(user, perf_counter())
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                intended_s = perf_counter()

    async def _send(self, user: _User, intended_s: float) -> Exchange:
        """Send the draft; while it is in flight, read the previous answer and make the next draft."""
        request, payload = user.draft
        if user.connection is None or not user.connection.is_open:
            outcome = await self._try_connect()
            if isinstance(outcome, str):
                now_s = perf_counter()
                failed = Exchange(intended_s=intended_s, sent_s=now_s, ended_s=now_s, fault=outcome)
                user.unread.append((request, failed))
                user.draft = self._draft()
                return failed
            user.connection = outcome
        exchange, done = user.connection.start(payload, intended_s=intended_s)
        self.log.note_flight(+1)
        self._read(user, perf_counter())
        user.unread.append((request, exchange))
        user.draft = self._draft()
        try:
            await done
        finally:
            self.log.note_flight(-1)
        return exchange

    def _read(self, user: _User, now_s: float) -> None:
        for request, exchange in user.unread:
            record = read_completion(exchange, request, origin_s=self.log.origin_s, now_s=now_s)
            self.log.records.append(record)
            self.log.sent_prompt_tokens[request.index] = len(request.prompt_token_ids)
        user.unread.clear()

    async def _probe_lag(self) -> None:
        due_s = perf_counter()
        while True:
            due_s = max(due_s + _LAG_PROBE_S, perf_counter())
            await asyncio.sleep(due_s - perf_counter())
            self.log.loop_lags.append((self.log.now_s(), perf_counter() - due_s))
