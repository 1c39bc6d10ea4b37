"""Bytes off the wire become the body the server sent, however the network cut them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.load.connection import Endpoint, ProtocolError, ResponseReader

BODY = b"data: {}\n\n0\r\n\r\n" * 3
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(body: bytes, size: int, extension: bytes = b";ext=1") -> bytes:
    """A response in chunks of one size, with an extension and a trailer."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(f"{len(piece):X}".encode() + extension + b"\r\n" + piece + b"\r\n" for piece in pieces)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nTrailer: x\r\n\r\n"


def read(data: bytes, cuts: list[int]) -> tuple[bytes, ResponseReader]:
    """Feed a response cut at these places."""
    reader = ResponseReader()
    ends = sorted({cut % len(data) for cut in cuts} | {len(data)})
    body = b"".join(reader.feed(data[start:end]) for start, end in zip([0, *ends], ends, strict=False))
    return body, reader


@given(st.lists(st.integers(0, 10**6)), st.integers(1, 60), st.sampled_from([b"", b" ", b";ext=1"]))
def test_any_cutting_of_a_chunked_response_gives_its_body(cuts: list[int], size: int, extension: bytes) -> None:
    """A reader that relies on reads and chunks falling together loses tokens under load."""
    body, reader = read(chunked(BODY, size, extension), cuts)
    assert body == BODY
    assert reader.complete
    assert reader.status == 200
    assert reader.keep_alive


@given(st.lists(st.integers(0, 10**6)))
def test_a_response_of_declared_length_ends_by_itself(cuts: list[int]) -> None:
    """Error pages come with a length; waiting for the close would hang the user on a kept-alive connection."""
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy"
    body, reader = read(data, cuts)
    assert (body, reader.status, reader.complete, reader.keep_alive) == (b"busy", 503, True, False)


def test_a_response_without_length_ends_with_the_connection() -> None:
    """HTTP/1.0-style servers close to end a stream; that is an end, not a cut."""
    reader = ResponseReader()
    assert reader.feed(HEAD + b"\r\nabc") == b"abc"
    complete_before = reader.complete
    reader.close()
    assert (complete_before, reader.complete) == (False, True)
    assert not reader.keep_alive


def test_a_chunked_response_that_stops_is_not_complete() -> None:
    """A crashed server's last words must not pass as a whole answer."""
    reader = ResponseReader()
    reader.feed(chunked(BODY, 7)[:-9])
    reader.close()
    assert not reader.complete


def test_a_response_ends_with_its_last_byte_and_not_before() -> None:
    """Two bytes left over would be read as the head of the next response on the same connection."""
    data = chunked(BODY, 7)
    reader = ResponseReader()
    reader.feed(data[:-2])
    complete_before = reader.complete
    reader.feed(data[-2:])
    assert (complete_before, reader.complete) == (False, True)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        HEAD + b"Content-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(data: bytes) -> None:
    """The wrong port, or a broken proxy, is an error that shows the bytes, not a hang."""
    with pytest.raises(ProtocolError):
        ResponseReader().feed(data)


@pytest.mark.parametrize("url", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_an_address_is_read_with_or_without_its_version_path(url: str) -> None:
    """Users paste the base URL that their client library wants."""
    assert Endpoint.from_url(url) == Endpoint("h", 8000)


def test_an_address_that_is_not_plain_http_is_refused() -> None:
    """TLS would be timed with the engine; it is not silently spoken in clear either."""
    with pytest.raises(ValueError, match="https://h"):
        Endpoint.from_url("https://h")
    assert Endpoint.from_url("http://h/llm/v1") == Endpoint("h", 80, "/llm")
