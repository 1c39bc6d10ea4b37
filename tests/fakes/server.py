"""A stub engine on a real socket whose every frame is known: schedule, packing, odd frames, errors, cuts, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from tuner.load.connection import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What the stub does with one request."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens_per_chunk: int = 1
    usage: Literal["running", "final", "none"] = "running"
    num_tokens: int | None = None
    """Tokens to give; None: as many as asked."""

    opening_frames: tuple[dict[str, Any], ...] = ()
    """Sent at once, before the first token."""

    script: tuple[tuple[float, bytes], ...] | None = None
    """(seconds after the request, event): just these are sent, in place of all others."""

    status: int = 200
    retry_after: str | None = None
    """What a refusal asks for."""

    error_after: int | None = None
    """Chunks after which an error object is sent, then the end mark."""

    cut_after: int | None = None
    """Chunks after which the socket is closed."""

    hang_after: int | None = None
    """Chunks after which nothing comes any more."""

    hangs_up: bool = False
    """Whether the connection is closed after the answer, although nothing in it said so."""


@dataclass(slots=True)
class StubEngine:
    """Counts what it sees while it serves."""

    behave: Callable[[int], Behaviour]
    """The behaviour of the n-th completion request, from 0."""

    prefix_hit_rate: float | None = None
    """What its metrics say of the prefix cache; None: nothing."""

    num_slots: int | None = None
    """Requests it serves at once; the others wait in it. None: all."""

    tells_ids: bool = True
    """Whether it knows `return_token_ids`."""

    tokens_per_word: float = 1.0
    """How it counts the text of a chat."""

    tokens_per_message: int = 0
    preemptions: int | None = 0
    num_requests: int = 0
    num_ended: int = 0
    """Requests that were answered to their end."""

    num_in_flight: int = 0
    peak_in_flight: int = 0
    num_dropped: int = 0
    """Requests whose client went away before the end."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefilling: bool = False
    """Whether its KV use grows from scrape to scrape, as in a prompt that takes many steps."""

    tokens_per_step: int | None = None
    """What its metrics say a step holds; None: nothing."""

    pages: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and body of what is asked for by other paths, and of `/metrics` in place of its own; others are 404."""

    authorizations: set[str] = field(default_factory=set)
    """Every `Authorization` it was sent, an empty one where there was none."""

    num_scrapes: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    """When each request came, by `perf_counter`."""

    endpoint: Endpoint = field(default_factory=lambda: Endpoint("127.0.0.1", 0))
    _serving: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)
    _slots: asyncio.Semaphore | contextlib.nullcontext[None] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = contextlib.nullcontext() if self.num_slots is None else asyncio.Semaphore(self.num_slots)

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, known from its first moment: a coroutine here could be cancelled before it began."""
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving[task] = writer
        task.add_done_callback(self._serving.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read_request(reader)) is not None:
                path, authorization, body = request
                self.authorizations.add(authorization)
                if path in self.pages:
                    writer.write(_plain(*self.pages[path], "text/plain"))
                elif path == "/metrics":
                    writer.write(_plain(200, self._metrics_page(), "text/plain"))
                elif not path.endswith("/completions"):
                    writer.write(_plain(404, "{}", "application/json"))
                elif not await self._complete(json.loads(body), writer):
                    break
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        num_prompt_tokens = self._count(body)
        if not body.get("stream"):
            ids = {"token_ids": [_SAID_TOKEN]} if body.get("return_token_ids") and self.tells_ids else {}
            answer = {"choices": [{"text": "x", **ids}], "usage": {"prompt_tokens": num_prompt_tokens}}
            writer.write(_plain(200, json.dumps(answer), "application/json"))
            return True
        self.arrivals_s.append(perf_counter())
        behaviour = self.behave(self.num_requests)
        self.num_requests += 1
        self.bodies.append(body)
        self.num_in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.num_in_flight)
        self.prompt_tokens += num_prompt_tokens
        try:
            if behaviour.status != 200:
                error = json.dumps({"error": {"message": f"stub says {behaviour.status}"}})
                writer.write(_plain(behaviour.status, error, "application/json", retry_after=behaviour.retry_after))
                return True
            async with self._slots:
                return await self._stream(behaviour, body, num_prompt_tokens, writer) and not behaviour.hangs_up
        finally:
            self.num_in_flight -= 1

    def _count(self, body: dict[str, Any]) -> int:
        if "prompt" in body:
            return len(body["prompt"])
        words = sum(len(message["content"].split()) for message in body["messages"])
        return round(words * self.tokens_per_word) + self.tokens_per_message * len(body["messages"])

    async def _play(self, script: tuple[tuple[float, bytes], ...], writer: asyncio.StreamWriter) -> bool:
        begun_s = perf_counter()
        for at_s, said in script:
            await self._sleep(max(0.0, begun_s + at_s - perf_counter()), writer)
            writer.write(_chunk(said))
        writer.write(b"0\r\n\r\n")
        return True

    async def _stream(
        self, behaviour: Behaviour, body: dict[str, Any], num_prompt_tokens: int, writer: asyncio.StreamWriter
    ) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if behaviour.script is not None:
            return await self._play(behaviour.script, writer)
        for frame in behaviour.opening_frames:
            writer.write(_chunk(event(frame)))
        await self._sleep(behaviour.ttft_s, writer)
        frames = completion_frames(
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=behaviour.num_tokens or body["max_tokens"],
            tokens_per_chunk=behaviour.tokens_per_chunk,
            usage=behaviour.usage,
            is_chat="messages" in body,
            ids=body.get("return_token_ids", False),
        )
        for sent, frame in enumerate(frames):
            if sent == behaviour.cut_after:
                return False
            if sent == behaviour.hang_after:
                await self._sleep(3600.0, writer)
            if sent == behaviour.error_after:
                writer.write(_chunk(event({"error": {"message": "engine died"}}) + DONE) + b"0\r\n\r\n")
                return True
            if sent and frame["choices"]:
                await self._sleep(behaviour.itl_s, writer)
            writer.write(_chunk(event(frame)))
            self.generated_tokens += _num_tokens(frame)
        self.num_ended += 1
        writer.write(_chunk(DONE) + b"0\r\n\r\n")
        return True

    async def _sleep(self, seconds: float, writer: asyncio.StreamWriter) -> None:
        if seconds:
            await asyncio.sleep(seconds)
        if writer.transport.is_closing():
            self.num_dropped += 1
            raise ConnectionResetError

    def _metrics_page(self) -> str:
        self.num_scrapes += 1
        usage = 0.25 + 0.001 * self.num_scrapes * self.prefilling
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {float(self.num_in_flight)}',
            'vllm:num_requests_waiting{engine="0"} 0.0',
            f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}',
            f'vllm:generation_tokens_total{{engine="0"}} {float(self.generated_tokens)}',
            f'vllm:request_success_total{{engine="0",finished_reason="length"}} {float(self.num_ended)}',
            f'vllm:request_success_total{{engine="0",finished_reason="abort"}} {float(self.num_dropped)}',
        ]
        if self.tokens_per_step is not None:
            steps = self.generated_tokens // self.tokens_per_step
            lines.append(f"vllm:iteration_tokens_total_sum {float(steps * self.tokens_per_step)}")
            lines.append(f"vllm:iteration_tokens_total_count {float(steps)}")
        if self.preemptions is not None:
            lines.append(f'vllm:num_preemptions_total{{engine="0"}} {float(self.preemptions)}')
        if self.prefix_hit_rate is not None:
            lines.append(f"vllm:prefix_cache_queries_total {float(self.prompt_tokens)}")
            lines.append(f"vllm:prefix_cache_hits_total {self.prefix_hit_rate * self.prompt_tokens}")
        return "\n".join(lines) + "\n"

    async def stop(self) -> None:
        """End all connections, those that were accepted a moment ago too."""
        for _ in range(_TURNS_TO_ACCEPT):
            await asyncio.sleep(0)
        serving = dict(self._serving)
        for task, writer in serving.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*serving, return_exceptions=True)
        await asyncio.gather(*(writer.wait_closed() for writer in serving.values()), return_exceptions=True)


@asynccontextmanager
async def running_stub(
    behave: Behaviour | Callable[[int], Behaviour],
    *,
    preemptions: int | None = 0,
    prefix_hit_rate: float | None = None,
    prefilling: bool = False,
    tokens_per_step: int | None = None,
    **more: Any,
) -> AsyncIterator[StubEngine]:
    """A stub that listens on a free port of 127.0.0.1 while it is entered."""
    chosen = (lambda _: behave) if isinstance(behave, Behaviour) else behave
    stub = StubEngine(
        behave=chosen, preemptions=preemptions, prefix_hit_rate=prefix_hit_rate, prefilling=prefilling, **more
    )
    stub.tokens_per_step = tokens_per_step
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0, backlog=1024)
    stub.endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield stub
    finally:
        server.close()
        await stub.stop()


_TURNS_TO_ACCEPT = 4
"""Turns of the event loop between accepting a socket and serving it, and one more."""

_SAID_TOKEN = 77
"""The id of whatever it says."""

DONE = b"data: [DONE]\n\n"


def event(frame: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def completion_frames(
    *,
    num_prompt_tokens: int,
    num_tokens: int,
    tokens_per_chunk: int = 1,
    usage: str = "running",
    is_chat: bool = False,
    ids: bool = False,
) -> list[dict[str, Any]]:
    """The JSON frames of a streamed completion or chat, vLLM's shape, without the end mark."""
    frames: list[dict[str, Any]] = []
    given = 0
    while given < num_tokens:
        now = min(tokens_per_chunk, num_tokens - given)
        given += now
        finish = "length" if given == num_tokens else None
        said: dict[str, Any] = {"delta": {"content": "x" * now}} if is_chat else {"text": "x" * now}
        if ids:
            said["token_ids"] = [_SAID_TOKEN] * now
        frame: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": finish, **said}]}
        if usage == "running":
            frame["usage"] = _usage(num_prompt_tokens, given)
        frames.append(frame)
    if usage != "none":
        frames.append({"choices": [], "usage": _usage(num_prompt_tokens, num_tokens)})
    return frames


def _num_tokens(frame: dict[str, Any]) -> int:
    said = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in frame["choices"]]
    return sum(map(len, said))


def _usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def _chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def _plain(status: int, text: str, content_type: str, *, retry_after: str | None = None) -> bytes:
    wait = "" if retry_after is None else f"Retry-After: {retry_after}\r\n"
    size = len(text.encode())
    head = f"HTTP/1.1 {status} Stub\r\nContent-Type: {content_type}\r\n{wait}Content-Length: {size}\r\n\r\n"
    return head.encode() + text.encode()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes] | None:
    """Path, `Authorization` and body; None where the client has gone."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")]
    body = await reader.readexactly(int(lengths[0])) if lengths else b""
    keys = [line.partition(":")[2].strip() for line in head.splitlines() if line.lower().startswith("authorization")]
    return head.split(" ")[1], keys[0] if keys else "", body
