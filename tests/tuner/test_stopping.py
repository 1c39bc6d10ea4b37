"""A stop is never lost, wherever the program is when it comes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from tuner.stopping import StopOnInterrupt, run_until_told

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def terminable() -> Iterator[None]:
    """As a command has it: SIGTERM is a stop like any other."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


class _Receiver(asyncio.Protocol):
    def __init__(self, react: Callable[[], None]) -> None:
        self._react = react

    def data_received(self, _data: bytes) -> None:
        self._react()


async def _receive(react: Callable[[], None], ended: list[str]) -> None:
    """Wait, as a stage does, for what the transport's callback brings."""
    near, far = socket.socketpair()
    near.setblocking(False)  # noqa: FBT003 - socket's own signature
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: _Receiver(react), sock=near)
    far.send(b"data: token")
    try:
        await asyncio.sleep(20)
        ended.append("waited in vain")
    finally:
        ended.append("cleaned up")
        transport.close()
        far.close()


def _send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def test_sigterm_while_a_token_arrives_ends_the_coroutine_and_not_only_the_connection() -> None:
    """The loop that reads the tokens reports what its callbacks raise, and would measure on after the stop."""
    ended: list[str] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, pytest.raises(KeyboardInterrupt):
        run_until_told(runner, _receive(_send(signal.SIGTERM), ended))
    assert ended == ["cleaned up"]
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


def test_the_second_ctrl_c_while_a_token_arrives_ends_it_too() -> None:
    """Somebody in a hurry has said so twice."""
    ended: list[str] = []
    told: list[str] = []

    def twice() -> None:
        _send(signal.SIGINT)()
        _send(signal.SIGINT)()

    with (
        StopOnInterrupt(told.append) as stop,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        pytest.raises(KeyboardInterrupt),
    ):
        run_until_told(runner, _receive(twice, ended))
    assert ended == ["cleaned up"]
    assert stop.requested
    assert len(told) == 1


def test_a_stop_in_the_last_moment_of_a_coroutine_is_not_lost() -> None:
    """The next stage would begin as if nothing had been said."""

    async def last_moment() -> str:
        _send(signal.SIGTERM)()
        return "done"

    with asyncio.Runner() as runner, pytest.raises(KeyboardInterrupt):
        run_until_told(runner, last_moment())


def test_a_stop_whose_clean_up_fails_is_a_stop_still() -> None:
    """The answer from the stages that were kept would be lost to an error of a connection that closes."""

    async def fails_at_the_end() -> None:
        try:
            _send(signal.SIGTERM)()
            await asyncio.sleep(20)
        finally:
            raise OSError("connection reset")

    with asyncio.Runner() as runner, pytest.raises(KeyboardInterrupt):
        run_until_told(runner, fails_at_the_end())


def test_what_nobody_stops_returns_its_result_and_raises_its_own_errors() -> None:
    """A stage that fails is no interrupt: the run would end instead of saying what is wrong."""

    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def result() -> int:
        return 7

    def run(coroutine: Coroutine[Any, Any, object]) -> object:
        with asyncio.Runner() as runner:
            return run_until_told(runner, coroutine)

    assert run(result()) == 7
    with pytest.raises(asyncio.CancelledError):
        run(cancelled())


def test_outside_a_loop_the_second_ctrl_c_raises_where_it_is() -> None:
    """A study that waits for its worker has no loop."""
    with StopOnInterrupt(lambda _: None):
        _send(signal.SIGINT)()
        with pytest.raises(KeyboardInterrupt):
            _send(signal.SIGINT)()


def test_who_wants_sigterm_for_something_else_keeps_it() -> None:
    """The engine's own handler, or a caller's, is not taken away by a stage that is measured in its process."""
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    async def told() -> str:
        _send(signal.SIGTERM)()
        return "done"

    with asyncio.Runner() as runner:
        assert run_until_told(runner, told()) == "done"
    assert heard == [signal.SIGTERM]
