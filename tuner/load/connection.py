"""One HTTP/1.1 connection that stamps what arrives before it looks at it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

_MAX_LINE_BYTES = 65_536
_CONNECT_TIMEOUT_S = 5.0
_HTTP_OK = 200


class ProtocolError(ValueError):
    """The peer does not speak HTTP/1.1; the message shows the bytes."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens."""

    host: str
    port: int
    prefix: str = ""
    """Path before `/v1`; empty or starting with a slash."""

    api_key: str | None = field(default=None, repr=False)
    """Sent with every request as a bearer token; shown nowhere."""

    @classmethod
    def from_url(cls, url: str) -> Endpoint:
        """Read `http://host:port` with an optional path.

        Raises:
            ValueError: for anything but plain http; put a tunnel in front of a server that only speaks https.
        """
        parts = urlsplit(url)
        if parts.scheme == "https":
            raise ValueError(
                f"{url!r}: https is not spoken here: name the server's own http:// address, or forward a port to it "
                "with ssh -L 8000:127.0.0.1:8000 HOST"
            )
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url!r} is not an http:// address with a host: write http://127.0.0.1:8000")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/").removesuffix("/v1"))

    def with_key(self, api_key: str) -> Endpoint:
        """The same server, with a key to it."""
        return replace(self, api_key=api_key)

    @property
    def url(self) -> str:
        """The address without `/v1`, without anything secret."""
        return f"http://{self.netloc}{self.prefix}"

    @property
    def netloc(self) -> str:
        """Host and port as they stand in an address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def get(self, path: str) -> bytes:
        """The bytes of a GET request."""
        return f"GET {self.prefix}{path} HTTP/1.1\r\nHost: {self.netloc}\r\n{self._key_line}\r\n".encode()

    def post_json(self, path: str, body: bytes) -> bytes:
        """The bytes of a POST request with a JSON body."""
        head = (
            f"POST {self.prefix}{path} HTTP/1.1\r\nHost: {self.netloc}\r\n{self._key_line}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    @property
    def _key_line(self) -> str:
        return "" if self.api_key is None else f"Authorization: Bearer {self.api_key}\r\n"


@dataclass(slots=True)
class Exchange:
    """One request and all that came back, with times; everything else is worked out later. Times by `perf_counter`."""

    intended_s: float
    sent_s: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """Body bytes in order of arrival, each with the time of the read that brought it."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""

    ended_s: float | None = None
    """When the response was complete or the connection lost; None: still in flight."""

    fault: str | None = None
    """Why the response did not come to its own end."""

    @property
    def succeeded(self) -> bool:
        """Whether a whole response with status 200 arrived; what it says is another question."""
        return self.fault is None and self.status == _HTTP_OK

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(piece for _, piece in self.pieces)


class ResponseReader:
    """Takes the bytes of one response in any portions and gives back the body's bytes.

    `[0, consumed) given back or framing · [consumed, end) kept in the buffer until its line or chunk is whole`.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.complete = False
        self._buffer = b""
        self._step: Callable[[], bytes | None] = self._read_head
        self._left = 0
        self._between_chunks = False

    @property
    def keep_alive(self) -> bool:
        """Whether the connection can carry another request once this response is complete."""
        return self.headers.get("connection", "").lower() != "close" and self._step != self._read_until_close

    def feed(self, data: bytes) -> bytes:
        """Take what arrived; returns the body's part of it, often all but a few bytes.

        Raises:
            ProtocolError: where the bytes are no HTTP/1.1 response.
        """
        body: list[bytes] = []
        if self._buffer:
            data = self._buffer + data
        elif self._between_chunks:
            data = self._whole_chunks(data, body)
        self._buffer = data
        while data and not self.complete:
            piece = self._step()
            if piece is None:
                break
            if piece:
                body.append(piece)
        self._between_chunks = self._step == self._read_chunk_size
        return body[0] if len(body) == 1 else b"".join(body)

    def close(self) -> None:
        """The peer closed: that completes a body of undeclared length, and nothing else."""
        self.complete = self.complete or self._step == self._read_until_close

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise ProtocolError(f"a header line is longer than {_MAX_LINE_BYTES} bytes")
            return None
        line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        return line

    def _read_head(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        parts = line.split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise ProtocolError(f"not an HTTP/1.1 response: {line[:80]!r}")
        self.status = int(parts[1])
        self._step = self._read_header
        return b""

    def _read_header(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        if line:
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.strip().lower()] = value.strip()
        else:
            self._begin_body()
        return b""

    def _begin_body(self) -> None:
        length = self.headers.get("content-length")
        if self.status is not None and self.status < _HTTP_OK:
            self.headers.clear()
            self._step = self._read_head
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._step = self._read_chunk_size
        elif length is None:
            self._step = self._read_until_close
        elif length.isdigit():
            self._left = int(length)
            self._step = self._read_fixed
            self.complete = self._left == 0
        else:
            raise ProtocolError(f"content-length {length!r} is not a number")

    def _take(self) -> bytes:
        piece, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
        self._left -= len(piece)
        return piece

    def _read_fixed(self) -> bytes | None:
        piece = self._take()
        self.complete = self._left == 0
        return piece or None

    def _read_until_close(self) -> bytes | None:
        piece, self._buffer = self._buffer, b""
        return piece or None

    def _read_chunk_size(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            raise ProtocolError(f"chunk size {line[:80]!r} is not a hexadecimal number") from None
        self._step = self._read_chunk if self._left else self._read_trailer
        return b""

    def _whole_chunks(self, data: bytes, body: list[bytes]) -> bytes:
        """Take the chunks at the head of `data` that are whole; returns what is left.

        A server sends each event as a chunk, and a read brings it whole: this is the path that must cost little.
        """
        start = 0
        while (size_end := data.find(b"\r\n", start)) > start:
            try:
                size = int(data[start:size_end], 16)
            except ValueError:
                break
            end = size_end + 2 + size
            if size < 0 or data[end : end + 2] != b"\r\n":
                break
            start = end + 2
            if size == 0:
                self.complete = True
                break
            body.append(data[size_end + 2 : end])
        return data[start:]

    def _read_chunk(self) -> bytes | None:
        piece = self._take()
        if self._left == 0:
            self._step = self._read_chunk_end
        return piece or None

    def _read_chunk_end(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        if line:
            raise ProtocolError(f"a chunk is longer than it said: {line[:80]!r}")
        self._step = self._read_chunk_size
        return b""

    def _read_trailer(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        self.complete = not line
        return b""


def ignore_events(now_s: float, num_events: int) -> None:
    """For who has no meter to feed."""


def ignore_end(exchange: Exchange) -> None:
    """For who awaits the future."""


class Connection(asyncio.Protocol):
    """A kept-alive connection that carries one request at a time."""

    def __init__(self, on_events: Callable[[float, int], None] = ignore_events) -> None:
        self._on_events = on_events
        self._on_end: Callable[[Exchange], None] = ignore_end
        self._transport: asyncio.WriteTransport | None = None
        self._fd = -1
        self._reader = ResponseReader()
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent now."""
        return self._transport is not None and not self._transport.is_closing()

    def start(
        self, payload: bytes, *, intended_s: float | None, on_end: Callable[[Exchange], None] = ignore_end
    ) -> tuple[Exchange, asyncio.Future[None]]:
        """Send a request at once; the future resolves when the exchange has ended, well or badly.

        Args:
            intended_s: by `perf_counter`; None: when it is sent.
            on_end: called the moment it has ended, before the event loop sees to any other socket.

        Raises:
            ConnectionError: where the connection is closed or still busy.
        """
        if self._transport is None or self._transport.is_closing() or self._exchange is not None:
            raise ConnectionError("the connection is closed or busy: connect anew")
        self._reader = ResponseReader()
        self._done = asyncio.get_running_loop().create_future()
        self._on_end = on_end
        self._write(self._transport, payload)
        sent_s = perf_counter()
        self._exchange = Exchange(intended_s=sent_s if intended_s is None else intended_s, sent_s=sent_s)
        return self._exchange, self._done

    def _write(self, transport: asyncio.WriteTransport, payload: bytes) -> None:
        """Hand the bytes to the socket itself, and to the transport what the socket does not take at once.

        The event loop's transport would send only after everything else that is ready: in a burst of answers that is
        milliseconds later.
        """
        num_sent = 0
        if transport.get_write_buffer_size() == 0:
            try:
                num_sent = os.write(self._fd, payload)
            except OSError:
                # Full, or broken: the transport waits for the one and reports the other.
                num_sent = 0
        if num_sent < len(payload):
            transport.write(payload[num_sent:])

    def abort(self) -> None:
        """Close the socket now, unsent bytes dropped: the server sees that nobody listens any more."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.WriteTransport", transport)
        self._fd = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: the stamp comes first."""
        now_s = perf_counter()
        exchange = self._exchange
        if exchange is None:
            self.abort()
            return
        try:
            body = self._reader.feed(data)
        except ProtocolError as error:
            self._end(now_s, str(error))
            self.abort()
            return
        if body:
            exchange.pieces.append((now_s, body))
            self._on_events(now_s, body.count(b"data:"))
        if self._reader.complete:
            self._end(now_s, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        now_s = perf_counter()
        self._transport = None
        self._reader.close()
        if self._reader.complete:
            self._end(now_s, None)
        else:
            self._end(now_s, f"the connection was lost before the response ended{f': {exc}' if exc else ''}")

    def _end(self, now_s: float, fault: str | None) -> None:
        exchange, done = self._exchange, self._done
        if exchange is None or done is None:
            return
        self._exchange = self._done = None
        exchange.status, exchange.headers = self._reader.status, self._reader.headers
        exchange.ended_s, exchange.fault = now_s, fault
        if self._transport is not None and not self._reader.keep_alive:
            self._transport.close()
        if not done.done():
            done.set_result(None)
        self._on_end(exchange)


async def connect(endpoint: Endpoint, on_events: Callable[[float, int], None] = ignore_events) -> Connection:
    """Open a connection.

    Args:
        on_events: called with each read's time and how many events began in it: a meter, not a count to publish.

    Raises:
        OSError: refused, unreachable, or no answer within five seconds.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        _, connection = await loop.create_connection(lambda: Connection(on_events), endpoint.host, endpoint.port)
    return connection


async def fetch_text(connection: Connection, endpoint: Endpoint, path: str, *, timeout_s: float) -> str:
    """GET a page.

    Raises:
        OSError: where it cannot be had: connection lost, another status than 200, or too slow (`TimeoutError`).
    """
    try:
        async with asyncio.timeout(timeout_s):
            exchange, done = connection.start(endpoint.get(path), intended_s=perf_counter())
            await done
    except TimeoutError:
        connection.abort()
        raise
    if not exchange.succeeded:
        raise ConnectionError(f"GET {path}: {exchange.fault or f'HTTP {exchange.status}'}")
    return exchange.body.decode()
