"""The one command for a GPU works before there is one, in an environment as bare as a GPU box."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
