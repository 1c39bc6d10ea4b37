"""CPU use of a process tree, each process apart."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from tuner.measure.cpu import CpuTimes, HostTimes, OtherWork, cores_used, cpu_times, other_work

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


def test_what_others_did_is_what_neither_engine_nor_load_generator_did() -> None:
    """Four cores for ten seconds: the engine took 1.5, the load 0.5, a neighbour 1, and one was idle."""
    before = CpuTimes(ROOT, {ROOT: 1.0, CHILD: 2.0}, HostTimes(used_s=100.0, idle_s=50.0, own_s=7.0))
    after = CpuTimes(ROOT, {ROOT: 6.0, CHILD: 12.0}, HostTimes(used_s=130.0, idle_s=60.0, own_s=12.0))
    assert other_work(before, after, elapsed_s=10.0) == OtherWork(other_cores=1.0, idle_cores=1.0)
    assert other_work(None, after, elapsed_s=10.0) is None
    assert other_work(before, after, elapsed_s=0.0) is None


def test_a_neighbour_is_seen_by_what_it_uses() -> None:
    """Its work beside an engine makes figures that no quiet machine repeats."""
    spins = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as engine:
        try:
            before = cpu_times(engine.pid)
            with subprocess.Popen(spins) as neighbour:
                used = psutil.Process(neighbour.pid)
                while sum(used.cpu_times()[:2]) < 0.3:
                    pass
                after, used_s = cpu_times(engine.pid), sum(used.cpu_times()[:2])
                neighbour.kill()
            seen = other_work(before, after, elapsed_s=1.0)
        finally:
            engine.kill()
    assert seen is not None
    assert seen.other_cores >= 0.9 * used_s - 0.05
