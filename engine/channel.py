"""Messages between two processes over a stream socket: in order, whole, and sending never waits.

A sender that waits for a slow reader would hand its delay on: the core's next step would wait for HTTP. What the socket
does not take at once is kept here and goes out with the next `send`, `flush` or `wait`.
"""

from __future__ import annotations

import select
import socket
import struct
from multiprocessing.reduction import ForkingPickler
from time import perf_counter

_HEADER = struct.Struct("!I")
"""Before each message, its length. Unit: bytes."""

_READ_BYTES = 2**16
_FULL_BYTES = 2**16
"""A read that found so much may have emptied a full socket, which holds some 200 KB: there may be a backlog behind."""

_REFILL_S = 0.002
"""Within that a sender that is not busy has filled the room again. Unit: seconds."""

_MOST_REFILLS = 256
"""Of a sender that never ends; some 50 MB."""


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, one for each process's `Channel`; what one sends the other receives."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class Channel:
    """One end. Messages are what `multiprocessing` can send; the other end must be trusted, as its own child is.

    The backlog has no limit of its own. A core's is bounded by the work it has: a parent that reads nothing submits
    nothing either.
    """

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(0)  # nothing waits in a call
        self._end = end
        self._unsent = bytearray()
        self._unread = bytearray()
        self._num_read_bytes = 0
        self._poller = select.poll()

    def fileno(self) -> int:
        """The descriptor that becomes readable when `receive` has something to say."""
        return self._end.fileno()

    @property
    def has_backlog(self) -> bool:
        """Whether something waits to be sent; `flush` it when the descriptor is writable."""
        return bool(self._unsent)

    def send(self, message: object) -> None:
        """Send a message, or keep what the socket does not take.

        Raises:
            OSError: if the other end is gone.
        """
        body = ForkingPickler.dumps(message)
        self._unsent += _HEADER.pack(len(body))
        self._unsent += body
        self.flush()

    def flush(self) -> None:
        """Send of the backlog what the socket takes now.

        Raises:
            OSError: if the other end is gone.
        """
        while self._unsent:
            try:
                count = self._end.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:count]

    def receive(self) -> list[object]:
        """The messages that have come whole, perhaps none; never waits.

        Raises:
            EOFError: when the other end is gone and all it sent was read.
        """
        is_gone = self._read()
        messages = []
        start = 0
        while (body := start + _HEADER.size) <= len(self._unread):
            (length,) = _HEADER.unpack_from(self._unread, start)
            if body + length > len(self._unread):
                break
            messages.append(ForkingPickler.loads(self._unread[body : body + length]))
            start = body + length
        del self._unread[:start]
        if is_gone and not messages:
            raise EOFError("the other end is gone")
        return messages

    def receive_all(self) -> list[object]:
        """As `receive`, with what the other end could not send because the socket was full.

        A reader that has other work between two reads would else be told only a socket's worth each time, and of what
        ends a request only after all that was submitted before it.

        Raises:
            EOFError: as `receive`; what this call had read is then of no use to anybody.
        """
        messages = self.receive()
        for _ in range(_MOST_REFILLS):
            if self._num_read_bytes < _FULL_BYTES or not self.wait(_REFILL_S):
                break
            messages += self.receive()
        return messages

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something can be read, sending the backlog meanwhile; False when the time is up first.

        Raises:
            OSError: if the other end is gone while there is a backlog.
        """
        while True:
            events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            self._poller.register(self._end, events)
            happened = self._poller.poll(None if timeout_s is None else timeout_s * 1000)
            if not happened:
                return False
            if happened[0][1] & ~select.POLLOUT:
                return True
            self.flush()

    def drain(self, timeout_s: float) -> bool:
        """Wait until the other end has taken the backlog, or the time is up: False. For last words.

        Raises:
            OSError: if the other end is gone.
        """
        self._poller.register(self._end, select.POLLOUT)
        deadline_s = perf_counter() + timeout_s
        while self._unsent and (left_s := deadline_s - perf_counter()) > 0:
            self._poller.poll(left_s * 1000)
            self.flush()
        return not self._unsent

    def close(self) -> None:
        """Close this end; the other one reads what was sent, then `EOFError`."""
        self._end.close()

    def _read(self) -> bool:
        """Take in what has come; True when the other end is gone."""
        self._num_read_bytes = 0
        while True:
            try:
                chunk = self._end.recv(_READ_BYTES)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            if not chunk:
                return True
            self._unread += chunk
            self._num_read_bytes += len(chunk)
            if len(chunk) < _READ_BYTES:
                return False
