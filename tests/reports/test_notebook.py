"""The notebook's code, run on a stored run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plotly.graph_objects as go
import pytest

from tests.fakes.records import resolved_run
from tuner.store import RunStore

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "read_a_run.ipynb"


def test_the_notebook_reads_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each cell works on a finished run as it is stored, without being touched but for the path."""
    store, run = RunStore(tmp_path), resolved_run()
    (tmp_path / "job.yaml").write_text("{}", encoding="utf-8")
    store.write_recommendation(run.recommendation)
    for trial in run.trials:
        store.write_trial(trial)
    shown = SimpleNamespace(count=0)

    def count(_figure: go.Figure, *_: object) -> None:
        shown.count += 1

    monkeypatch.setattr(go.Figure, "show", count)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}

    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("runs/embedded-chat", str(tmp_path))
            exec(compile(source, cell["id"], "exec"), names)  # noqa: S102 - our own notebook

    assert shown.count == 5
    assert run.recommendation.reason in capsys.readouterr().out
    assert all(cell.get("outputs", []) == [] for cell in cells)
