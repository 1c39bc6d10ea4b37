"""CPU use of a process tree, each process apart."""

from __future__ import annotations

import os
import subprocess
import sys

from tuner.measure.cpu import CpuTimes, cores_used, cpu_times

ROOT, CHILD, LATE = (10, 1.0), (11, 2.0), (12, 3.0)


def test_each_process_is_seen_apart_and_the_launched_one_comes_first() -> None:
    """A server at its limit beside an idle core would be hidden in a sum or a mean."""
    before = CpuTimes(root=ROOT, used_s={ROOT: 5.0, CHILD: 100.0, (13, 1.0): 7.0})
    after = CpuTimes(root=ROOT, used_s={ROOT: 5.5, CHILD: 101.9, LATE: 0.2})
    assert cores_used(before, after, elapsed_s=2.0) == (0.25, (101.9 - 100.0) / 2, 0.1)


def test_what_was_not_seen_is_unknown() -> None:
    """A server elsewhere, or another process under the pid, has no CPU use; zero would say that it is idle."""
    look = CpuTimes(root=ROOT, used_s={ROOT: 5.0})
    assert cores_used(None, look, elapsed_s=1.0) is None
    assert cores_used(look, None, elapsed_s=1.0) is None
    assert cores_used(look, look, elapsed_s=0.0) is None
    assert cores_used(look, CpuTimes(root=CHILD, used_s={CHILD: 1.0}), elapsed_s=1.0) is None
    assert cpu_times(None) is None


def test_a_busy_child_is_found_below_its_parent() -> None:
    """The engine computes in a child of the process that was launched."""
    busy = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as child:
        try:
            first = cpu_times(os.getpid())
            assert first is not None
            key = next(key for key in first.used_s if key[0] == child.pid)
            while (now := cpu_times(os.getpid())) is not None and now.used_s[key] < first.used_s[key] + 0.05:
                pass
            assert now is not None
            assert now.root[0] == os.getpid()
            assert len(cores_used(first, now, elapsed_s=1.0) or ()) >= 2
        finally:
            child.kill()


def test_a_process_that_is_gone_is_unknown() -> None:
    """An engine that died during the stage has no figure."""
    with subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
        assert cpu_times(gone.pid) is None
