"""Our scheduler against the recorded decisions of vLLM's, and the command that compares them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.__main__ import main
from engine.replay import read_traces, replay
from tests.fakes.serving import ROOT

TRACES = ROOT / "tests" / "golden" / "vllm-scheduler-traces.json"
SCENARIOS = {scenario.id: scenario for scenario in read_traces(TRACES).scenarios}


def test_the_record_is_whole() -> None:
    """Nothing below is proved by scenarios that are not there."""
    assert (len(SCENARIOS), sum(len(scenario.steps) for scenario in SCENARIOS.values())) == (104, 5173)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_step_is_decided_as_vllm_decides_it(name: str) -> None:
    """A figure tuned here means the same there: tokens, order, preemptions, hits, even which block is handed out."""
    assert replay(SCENARIOS[name]) is None


def _small() -> dict[str, Any]:
    """A file of one short scenario: one request of 10 tokens, 8 outputs."""
    scenario = next(item for item in json.loads(TRACES.read_bytes())["scenarios"] if item["id"] == "B01_single")
    return {"scenarios": [scenario]}


def _write(folder: Path, content: object) -> str:
    path = folder / "traces.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("t", 6), ("sched", [["r0", 2]]), ("new", ["r0"]), ("resumed", ["r0"]), ("preempted", ["r0"])],
        *[("finished", [["r0", "stop"]]), ("running", [["r0", 1]]), ("waiting", ["r0"]), ("free_sched", 97)],
        *[("free", 99), ("hits", [["r0", 16]]), ("alloc", [["r0", [3]]]), ("free_queue", [1]), ("cached_free", [1])],
    ],
)
def test_a_difference_in_any_field_is_found_and_named(
    name: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay that agrees with anything would prove nothing."""
    traces = _small()
    traces["scenarios"][0]["steps"][7][name] = value
    assert main(["replay", _write(tmp_path, traces)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("0 of 1 scenarios agree")
    assert f"B01_single: step 7, {name}: recorded" in out


def test_the_outcome_as_json_names_scenario_step_field_and_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program can read what a person reads."""
    traces = _small()
    traces["scenarios"][0]["steps"][3]["free"] = 50
    assert main(["replay", "--json", _write(tmp_path, traces)]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "num_scenarios": 1,
        "num_steps": 8,
        "num_agree": 0,
        "differences": [{"scenario": "B01_single", "step": 3, "field": "free", "recorded": 50, "ours": 99}],
    }


def test_a_file_that_is_no_trace_file_is_refused_with_its_name_and_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong path or a cut file is told from a scheduler that differs."""
    assert main(["replay", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read: No such file" in capsys.readouterr().err
    cut = tmp_path / "cut.json"
    cut.write_bytes(TRACES.read_bytes()[:5000])
    assert main(["replay", str(cut)]) == 2
    assert "cut.json is not a file of scheduler traces" in capsys.readouterr().err
    traces = _small()
    del traces["scenarios"][0]["config"]["block_size"]
    assert main(["replay", _write(tmp_path, traces)]) == 2
    assert "scenarios.0.config.block_size" in capsys.readouterr().err
    traces = _small()
    traces["scenarios"][0]["requests"] *= 2
    assert main(["replay", _write(tmp_path, traces)]) == 2
    assert "'r0'" in capsys.readouterr().err


@pytest.mark.parametrize("value", [10**9, 10**400])
def test_a_recorded_size_beyond_memory_is_refused_by_its_place(
    value: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip in a trace does not take the machine's memory."""
    traces = _small()
    traces["scenarios"][0]["config"]["num_gpu_blocks"] = value
    assert main(["replay", _write(tmp_path, traces)]) == 2
    assert "scenarios.0.config.num_gpu_blocks: Input should be less than or equal to" in capsys.readouterr().err
    traces = _small()
    traces["scenarios"][0]["requests"][0]["prompt"] = [[0, value]]
    assert main(["replay", _write(tmp_path, traces)]) == 2
    assert "requests.0.prompt.0.1: Input should be less than or equal to" in capsys.readouterr().err


def test_the_command_needs_no_torch() -> None:
    """It answers in a second on any machine."""
    script = (
        "import sys; from engine.__main__ import main\n"
        f"code = main(['replay', {str(TRACES)!r}]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "104 of 104 scenarios agree in every step (5173 steps recorded)\n")
