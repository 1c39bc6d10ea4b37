"""Whatever belongs to a launch is found and ended, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.records import resolved_run
from tuner.engines.family import MARK, Launch, end, living, new_mark, read_launch, write_launch
from tuner.engines.leftovers import end_leftovers, nothing_left_alive
from tuner.job import load_job
from tuner.store import RunStore

FORK_TWICE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        sys.stdout.close()
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(600)
"""
"""Leaves a grandchild in a session of its own whose parent is gone."""


@pytest.fixture
def launch() -> Iterator[tuple[Launch, int, subprocess.Popen[str]]]:
    """A launch and the pid of what hides from it."""
    mark = new_mark()
    process = subprocess.Popen(
        [sys.executable, "-c", FORK_TWICE],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {MARK: mark},
        start_new_session=True,
    )
    assert process.stdout is not None
    hidden = int(process.stdout.readline())
    made = Launch(pid=process.pid, create_time=psutil.Process(process.pid).create_time(), mark=mark)
    yield made, hidden, process
    end(made)
    process.wait()
    process.stdout.close()


def test_what_left_session_and_parent_is_found_by_its_mark(launch: tuple[Launch, int, subprocess.Popen[str]]) -> None:
    """A worker that hides keeps no device: it inherited the mark, and nothing else has it."""
    made, hidden, process = launch
    assert {member.pid for member in living(made)} == {process.pid, hidden}
    process.kill()
    process.wait()
    assert {member.pid for member in living(made)} == {hidden}
    end(made)
    assert living(made) == []


def test_a_pid_that_was_given_away_again_is_not_ours(launch: tuple[Launch, int, subprocess.Popen[str]]) -> None:
    """A process that merely has the recorded pid is a stranger, and is never signalled."""
    made, _, process = launch
    stranger = Launch(pid=made.pid, create_time=made.create_time + 1000.0, mark=new_mark())
    assert living(stranger) == []
    end(stranger)
    assert process.poll() is None


def test_what_a_run_left_is_ended_by_its_records(
    launch: tuple[Launch, int, subprocess.Popen[str]], tmp_path: Path
) -> None:
    """A run that was cut off is cleaned up by what it wrote down, and a trial without a record harms nothing."""
    made, _, process = launch
    store = RunStore.create(tmp_path, load_job("embedded"), resolved_run().recommendation.provenance)
    write_launch(store.trial_directory(0), made)
    store.trial_directory(1)
    (store.trial_directory(2) / "process.json").write_text('{"pid": 1, "create')
    assert end_leftovers(store) == [store.trial_directory(0)]
    assert process.wait() != 0
    assert end_leftovers(store) == []
    assert read_launch(store.trial_directory(2)) is None


def test_a_run_that_is_stopped_leaves_nothing_of_an_engine_that_was_starting(
    launch: tuple[Launch, int, subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Its worker's death ends an engine's first process; what that had started would keep its memory for ever."""
    made, _, process = launch
    store = RunStore.create(tmp_path, load_job("embedded"), resolved_run().recommendation.provenance)
    write_launch(store.trial_directory(0), made)
    process.kill()
    process.wait()
    assert living(made) != []
    with pytest.raises(KeyboardInterrupt), nothing_left_alive(store):
        raise KeyboardInterrupt
    assert living(made) == []


def test_ending_what_is_gone_already_is_quick_and_quiet() -> None:
    """Cleaning up twice does no harm."""
    process = subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True)
    made = Launch(pid=process.pid, create_time=psutil.Process(process.pid).create_time(), mark=new_mark())
    process.wait()
    end(made)
