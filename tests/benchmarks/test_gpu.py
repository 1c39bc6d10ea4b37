"""The one command for a GPU works before there is one, in an environment as bare as a GPU box."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.fakes.processes import gone, written_pid

ROOT = Path(__file__).parents[2]
ABSENT = ("ray", "optuna", "fastapi", "psutil", "scipy", "uvloop", "pyarrow", "plotly", "pynvml", "pytest")

TABLES = {
    *("Floors", "Decode attention, 64 requests", "Prompt attention", "Row kernels"),
    *("Step times, small, tiny", "Tokens/s, small, tiny", "Kernels beside the reference, small, tiny"),
    *("Ladder over HTTP, small, tiny, chat-short", "Knee", "Memory", "Tokens/s, large, tiny"),
}


def test_all_of_it_runs_on_a_cpu_without_what_a_gpu_box_lacks(tmp_path: Path) -> None:
    """Minutes on a GPU are dear: an import or a key that fails only there wastes them."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({ABSENT!r})\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--smoke", "--out", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["failures"] == {}
    assert found["smoke"] is True
    assert found["tables"].keys() == TABLES
    assert all(found["tables"].values())
    assert "no figure here means anything" in (tmp_path / "out" / "results.md").read_text()


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    """Figures of a CPU under a GPU's heading would be believed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path / "out")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "torch finds no GPU: --smoke runs all of it on a CPU" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """`gpu` and `served`, imported as the command does: from their own folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("gpu", "served"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import gpu  # type: ignore[import-not-found]
    import served  # type: ignore[import-not-found]

    return gpu, served


_SERVES_AND_WAITS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.environ["PID_FILE"], "w") as file:
    file.write(f"{child.pid}\\n")
time.sleep(float(os.environ["THEN_WAITS_S"]))
"""


@pytest.mark.parametrize("then_waits_s", [600, 0], ids=["too slow", "forgot it"])
def test_nothing_that_a_part_has_started_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: tuple[ModuleType, ModuleType], then_waits_s: float
) -> None:
    """A server that stays holds nine tenths of the GPU, and every part after it fails for memory."""
    gpu, _ = scripts
    script, pid_file = tmp_path / "part.py", tmp_path / "pid"
    script.write_text(_SERVES_AND_WAITS)
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setenv("PID_FILE", str(pid_file))
    monkeypatch.setenv("THEN_WAITS_S", str(then_waits_s))
    (tmp_path / "floors.json").write_text("{}")
    gpu._in_a_process("floors", tmp_path, 5.0, smoke=True)
    if pid_file.exists() and psutil.pid_exists(int(pid_file.read_text())):
        assert gone(written_pid(pid_file))
    assert pid_file.exists()


def test_an_engine_that_does_not_start_says_why(
    capfd: pytest.CaptureFixture[str], scripts: tuple[ModuleType, ModuleType]
) -> None:
    """The minutes on a GPU are over when somebody reads it, and nothing else tells what was wrong."""
    _, served = scripts
    wrong = served.served("embedded", "--device", "cpu", "--max-num-seqs", "0")
    with pytest.raises(RuntimeError, match="max_num_seqs"), wrong:
        pytest.fail("it came up")
    assert "max_num_seqs" in capfd.readouterr().err
