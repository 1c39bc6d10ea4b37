"""A machine that would spoil the figures is told so before it does, with what to do about it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.doctor import (
    Finding,
    Fitness,
    examine,
    judge_busy,
    judge_clock,
    judge_cores,
    judge_device,
    judge_disk,
    judge_files,
    judge_governor,
    judge_memory,
)
from tuner.engines.family import MARK, new_mark

GIB = 2**30


@pytest.mark.parametrize(
    ("finding", "fitness", "told"),
    [
        (judge_cores(1), Fitness.BAD, "1 core"),
        (judge_cores(2), Fitness.GOOD, "2 cores"),
        (judge_busy([("stress 77", 0.9), ("sshd 1", 0.01)]), Fitness.DOUBTFUL, "stress 77 (0.9 cores)"),
        (judge_busy([("sshd 1", 0.01)]), Fitness.GOOD, "nothing"),
        (judge_governor("powersave"), Fitness.DOUBTFUL, "powersave"),
        (judge_governor("performance"), Fitness.GOOD, "performance"),
        (judge_governor(None), Fitness.UNKNOWN, "does not say"),
        (judge_clock("hpet"), Fitness.DOUBTFUL, "hpet"),
        (judge_clock("tsc"), Fitness.GOOD, "tsc"),
        (judge_memory(GIB, 0.0), Fitness.BAD, "1.0 GiB"),
        (judge_memory(8 * GIB, 80.0), Fitness.DOUBTFUL, "80 %"),
        (judge_memory(8 * GIB, 0.0), Fitness.GOOD, "8.0 GiB"),
        (judge_files(1024), Fitness.DOUBTFUL, "1024"),
        (judge_files(resource.RLIM_INFINITY), Fitness.GOOD, "no limit"),
        (judge_device("run x, trial 3", [], None), Fitness.DOUBTFUL, "run x, trial 3"),
        (judge_device(None, [12], None), Fitness.DOUBTFUL, "12"),
        (judge_device(None, [], ["00000000:01:00.0, 42, python, 3000 MiB"]), Fitness.DOUBTFUL, "42, python"),
        (judge_device(None, [], []), Fitness.GOOD, "GPU"),
        (judge_device(None, [], None, in_the_way="pid 9 is on cpu:0; stop it first"), Fitness.BAD, "pid 9 is on cpu:0"),
    ],
)
def test_each_thing_is_judged_by_what_was_found_and_what_is_not_good_says_what_to_do(
    finding: Finding, fitness: Fitness, told: str
) -> None:
    """The finding names its figure, and nobody is left alone with a bare warning."""
    assert finding.fitness is fitness
    assert told in finding.found
    assert (finding.advice is not None) == (fitness in (Fitness.BAD, Fitness.DOUBTFUL))


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_it_will_lie_in(tmp_path: Path) -> None:
    """The first run finds its disk examined too."""
    assert str(tmp_path) in judge_disk(tmp_path / "runs" / "deeper").found


def test_an_engine_that_nobody_owns_is_found(tmp_path: Path) -> None:
    """What an earlier run left on the device is seen before it disturbs the next."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = subprocess.Popen(command, env=dict(os.environ) | {MARK: new_mark()})
    try:
        device = next(finding for finding in examine(tmp_path) if finding.subject == "device")
        assert device.fitness is Fitness.DOUBTFUL
        assert str(left.pid) in device.found or "measuring" in device.found
    finally:
        left.kill()
        left.wait()
