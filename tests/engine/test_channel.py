"""Messages between two processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.channel import Channel, channel_pair

_LARGE = 4 * 2**20
"""More than a socket holds. Unit: bytes."""


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Both ends, in this process."""
    first, second = map(Channel, channel_pair())
    yield first, second
    first.close()
    second.close()


@given(sizes=st.lists(st.integers(0, 300_000), max_size=12), reads=st.lists(st.booleans(), max_size=40))
def test_messages_arrive_whole_and_in_order(sizes: list[int], reads: list[bool]) -> None:
    """Whenever either side acts, and however much a socket takes at once: a lost or mixed report would mix answers."""
    sender, receiver = map(Channel, channel_pair())
    got: list[object] = []
    to_send = list(enumerate(sizes))
    for is_read in reads:
        if is_read:
            got += receiver.receive()
        elif to_send:
            index, size = to_send.pop(0)
            sender.send((index, b"x" * size))
    for index, size in to_send:
        sender.send((index, b"x" * size))
    while sender.has_backlog:
        got += receiver.receive()
        sender.flush()
    got += receiver.receive()
    sender.close()
    receiver.close()
    assert got == [(index, b"x" * size) for index, size in enumerate(sizes)]


def test_more_than_a_socket_holds_is_heard_at_once(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core hears of a burst, and of clients that have hung up, before its next step and not a socketful a step."""
    sender, receiver = ends
    wait = receiver.wait

    def sender_sees_room(timeout_s: float | None = None) -> bool:
        sender.flush()
        return wait(timeout_s)

    monkeypatch.setattr(receiver, "wait", sender_sees_room)
    sent = [(index, b"x" * 5000) for index in range(900)]
    for message in sent:
        sender.send(message)
    assert sender.has_backlog

    assert receiver.receive_all() == sent


def test_a_sender_that_never_ends_is_left_at_some_point(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much comes in, steps go on."""
    sender, receiver = ends

    def sender_has_more(timeout_s: float | None = None) -> bool:
        sender.send(b"x" * 2**17)
        return True

    monkeypatch.setattr(receiver, "wait", sender_has_more)
    sender.send(b"x" * 2**17)

    assert len(receiver.receive_all()) > 1


def test_sending_does_not_wait_for_a_reader(ends: tuple[Channel, Channel]) -> None:
    """With nobody reading, `send` returns and keeps what the socket did not take."""
    sender, receiver = ends
    sender.send(b"x" * _LARGE)
    sender.send("last")
    assert sender.has_backlog
    assert not sender.drain(0.01)
    got: list[object] = []
    while not got or got[-1] != "last":
        sender.flush()
        got += receiver.receive()
    assert got == [b"x" * _LARGE, "last"]


def test_waiting_sends_what_was_kept_back(ends: tuple[Channel, Channel]) -> None:
    """Two sides that both wait for an answer would wait for ever if one kept the question."""
    asking, answering = ends
    asking.send(b"x" * _LARGE)
    while not answering.receive():
        assert not asking.wait(0)
    answering.send("answer")
    assert asking.wait(1)
    assert asking.receive() == ["answer"]


def test_the_end_comes_after_the_last_words(ends: tuple[Channel, Channel]) -> None:
    """Why a core ended is worth more than that it did."""
    core, parent = ends
    parent.send("never read")
    core.send("why")
    core.close()
    assert parent.receive() == ["why"]
    with pytest.raises(EOFError):
        parent.receive()
    with pytest.raises(OSError, match="pipe"):
        parent.send("too late")
