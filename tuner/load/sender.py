"""What every load generator has: connections, the requests it sent, and a probe of its own lateness."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, thread_time
from typing import Any

from tuner.load.client import read_answer, read_completion, reading_completion, request_bytes
from tuner.load.connection import Connection, Endpoint, Exchange, connect
from tuner.load.log import LoadLog, SentPrompt
from tuner.load.prompts import Conversation, PromptRequest
from tuner.records import RequestRecord

_LAG_PROBE_S = 0.05

MAX_IDLE_S = 4.0
"""A connection that carried nothing for longer is not used again: uvicorn, vLLM's server, closes after five seconds."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A request that only has to be written to a socket."""

    conversation: Conversation
    request: PromptRequest
    payload: bytes


OnEnd = Callable[[Draft, Exchange], None]
"""Called the moment an exchange has ended, well or badly: it must not take long."""


@dataclass(slots=True)
class Sender:
    """Sends drafts, one connection each, without a limit; keeps what came back until it is read."""

    endpoint: Endpoint
    model: str
    log: LoadLog = field(default_factory=LoadLog)
    _idle: list[tuple[float, Connection]] = field(default_factory=list)
    _in_flight: dict[int, tuple[Draft, Exchange, Connection]] = field(default_factory=dict)
    """By request index."""

    _unread: deque[tuple[PromptRequest, Exchange]] = field(default_factory=deque)
    _reading: tuple[PromptRequest, Iterator[RequestRecord | None]] | None = None
    """The answer that is being read."""

    _is_kept_open: bool = True
    """Whether the server leaves a connection open after an answer; llama.cpp's closes it, and does not say so."""

    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _fault: BaseException | None = None

    def draft(self, conversation: Conversation) -> Draft:
        """The first request of a conversation."""
        return self._written(conversation, next(conversation))

    def next_draft(self, draft: Draft, exchange: Exchange) -> Draft | None:
        """The turn after one that went well; None where it was the last, or none can follow."""
        if not draft.request.has_next_turn or not exchange.succeeded:
            return None
        answer = read_answer(exchange)
        if answer.num_tokens == 0:
            return None
        return self._written(draft.conversation, draft.conversation.send(answer))

    def _written(self, conversation: Conversation, request: PromptRequest) -> Draft:
        return Draft(conversation, request, request_bytes(request, endpoint=self.endpoint, model=self.model))

    def start(self) -> None:
        """The stage's clock starts now."""
        self.log.origin_s = perf_counter()
        self.run(self._probe_lag())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until it ends or the generator stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and self._fault is None:
            self._fault = task.exception()

    def check(self) -> None:
        """Raise what a task died of, if one did."""
        if self._fault is not None:
            raise self._fault

    async def keep_ready(self, count: int) -> None:
        """Have so many fresh connections open; one that cannot be had is left for its request to fail with."""
        oldest_s = perf_counter() - MAX_IDLE_S
        fresh = [(since_s, each) for since_s, each in self._idle if each.is_open and since_s >= oldest_s]
        for _, connection in set(self._idle) - set(fresh):
            connection.abort()
        self._idle = fresh
        opened = await asyncio.gather(*(self._try_connect() for _ in range(count - len(fresh))))
        now_s = perf_counter()
        self._idle += [(now_s, each) for each in opened if not isinstance(each, str)]

    async def _try_connect(self) -> Connection | str:
        try:
            connection = await connect(self.endpoint, self.log.note_events)
        except OSError as error:
            return f"no connection to {self.endpoint.host}:{self.endpoint.port}: {error}"
        return connection if connection.is_open else "the server closed the connection at once"

    def _take_idle(self) -> Connection | None:
        oldest_s = perf_counter() - MAX_IDLE_S
        while self._idle:
            since_s, connection = self._idle.pop()
            if connection.is_open and since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def think_until(self, due_s: float) -> None:
        """Wait for the end of a user's pause, and note how late that was: no latency of the request that follows."""
        await asyncio.sleep(max(0.0, due_s - perf_counter()))
        self.log.late_returns.append((self.log.now_s(), perf_counter() - due_s))

    def send(self, draft: Draft, *, intended_s: float | None, on_end: OnEnd) -> None:
        """Write the request now, or as soon as there is a connection for it.

        Args:
            intended_s: by `perf_counter`; None: when it is written.
        """
        connection = self._take_idle()
        if connection is None:
            self.run(self._connect_and_send(draft, intended_s, on_end))
        else:
            self._launch(draft, connection, intended_s, on_end, was_idle=True)

    async def _connect_and_send(self, draft: Draft, intended_s: float | None, on_end: OnEnd) -> None:
        connection = await self._try_connect()
        if not isinstance(connection, str):
            self._launch(draft, connection, intended_s, on_end)
            return
        now_s = perf_counter()
        due_s = now_s if intended_s is None else intended_s
        failed = Exchange(intended_s=due_s, sent_s=now_s, ended_s=now_s, fault=connection)
        self._unread.append((draft.request, failed))
        on_end(draft, failed)

    def _launch(
        self,
        draft: Draft,
        connection: Connection,
        intended_s: float | None,
        on_end: OnEnd,
        *,
        was_idle: bool = False,
    ) -> None:
        landed = partial(self._land, draft.request.index, on_end, was_idle)
        exchange, _ = connection.start(draft.payload, intended_s=intended_s, on_end=landed)
        self._in_flight[draft.request.index] = draft, exchange, connection
        self.log.note_flight(+1)

    def _land(self, index: int, on_end: OnEnd, was_idle: bool, exchange: Exchange) -> None:  # noqa: FBT001 - bound above
        if index not in self._in_flight:  # dropped by `stop`
            return
        draft, _, connection = self._in_flight.pop(index)
        self.log.note_flight(-1)
        if was_idle and exchange.fault is not None and exchange.status is None:
            # A server may close an idle connection at any time (RFC 9112, 9.3.1); the request never reached it.
            self._is_kept_open = False
            self.run(self._connect_and_send(draft, exchange.intended_s, on_end))
            return
        self._unread.append((draft.request, exchange))
        if not self._is_kept_open:
            connection.abort()
        if connection.is_open:
            self._idle.append((perf_counter(), connection))
        on_end(draft, exchange)

    def read_some(self) -> bool:
        """Read a slice of the oldest ended exchange, if there is one; after the last slice it is a record."""
        if self._reading is None:
            if not self._unread:
                return False
            request, exchange = self._unread.popleft()
            slices = reading_completion(exchange, request, origin_s=self.log.origin_s, now_s=perf_counter())
            self._reading = request, slices
        request, slices = self._reading
        record = next(slices)
        if record is not None:
            self._keep(request, record)
            self._reading = None
        return True

    def _keep(self, request: PromptRequest, record: RequestRecord) -> None:
        num_tokens, num_shared = request.num_prompt_tokens, request.num_shared_tokens
        num_new = num_tokens - num_shared
        if len(request.messages) > 1:
            # How many tokens its own words are when they come back as text, only the server can tell.
            num_tokens = max(record.num_prompt_tokens, num_new)
        self.log.sent[request.index] = SentPrompt(num_tokens, num_tokens - num_new)
        self.log.records.append(record)

    async def stop(self) -> None:
        """Stop everything, drop what is in flight and record it as unfinished.

        Raises:
            Exception: what a task of the generator died of.
        """
        dropped = self._drop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self.read_some():
            pass
        for request, record in dropped:
            self._keep(request, record)
        for _, connection in self._idle:
            connection.abort()
        self.check()

    def _drop(self) -> list[tuple[PromptRequest, RequestRecord]]:
        """Abort what is in flight, all in one turn: an answer that ends while tasks stop would send another request."""
        now_s = perf_counter()
        in_flight = list(self._in_flight.values())
        self._in_flight.clear()
        dropped = []
        for draft, exchange, connection in in_flight:
            connection.abort()
            record = read_completion(exchange, draft.request, origin_s=self.log.origin_s, now_s=now_s)
            dropped.append((draft.request, record))
        return dropped

    async def _probe_lag(self) -> None:
        due_s = perf_counter()
        while True:
            due_s = max(due_s + _LAG_PROBE_S, perf_counter())
            await asyncio.sleep(due_s - perf_counter())
            self.log.loop_lags.append((self.log.now_s(), perf_counter() - due_s))
            self.log.cpu_times_s.append((self.log.now_s(), thread_time()))
