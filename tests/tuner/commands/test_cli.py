"""The command line: what a person types, reads and gets as an exit code."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import yaml

from tests.fakes.records import estimate, resolved_run
from tests.fakes.workers import FakeWorkers, Reshape
from tuner import __main__ as cli
from tuner import workers
from tuner.answer import Recommendation
from tuner.commands.show import answer_lines
from tuner.job import TuningJob
from tuner.placement import Placement
from tuner.records import Failed, FailureKind, StageRecord
from tuner.store import RunStore


class _Pool(FakeWorkers):
    """A fake pool that is entered and left like the real one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _saturating(made: StageRecord) -> StageRecord:
    running = min(made.load, 128 if not made.fenced else made.load // 2)
    return made.model_copy(
        update={
            "output_throughput": estimate(2000 * running / (5 + running), spread=0.02),
            "ttft_p95_ms": estimate(10.0 + made.load),
            "itl_p95_ms": estimate(4.0 + running),
            "num_preemptions": 0,
            "kv_cache_usage_peak": 0.3,
        }
    )


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `kneetune ARGUMENTS` in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["kneetune", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A finished run, made by the real command on a pool that launches nothing."""
    monkeypatch.setattr(workers, "Workers", lambda _: _Pool(reshape=_saturating))
    assert _run(monkeypatch, "tune", "embedded", "--trials", "5", "--runs", str(tmp_path)) == 0
    capsys.readouterr()
    return tmp_path / "embedded-chat"


def test_a_run_leaves_what_the_readme_promises(run: Path) -> None:
    """Whoever ran one command finds the answer, the report, both configs and the runbook."""
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert {
        "job.yaml",
        "study.journal",
        "slo.json",
        "trials.parquet",
        "stages.parquet",
        "recommendation.json",
        "report.html",
        "export/production.engine.yaml",
        "export/production.vllm.yaml",
        "export/protective.engine.yaml",
        "export/protective.vllm.yaml",
        "export/runbook.md",
    } <= left


def test_show_is_short_and_ends_with_the_next_command(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer fits a terminal, and its last line can be typed."""
    assert _run(monkeypatch, "show", str(run)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("resolved: ")
    assert lines[-1].split()[-2:] == ["--config", str(run / "export" / "production.engine.yaml")]
    assert sys.executable in lines[-1]
    assert len(lines) <= 18
    starts = [line.split()[0] for line in lines if line[0] != " "]
    assert "because" in starts
    assert "capacity" in starts


def test_show_json_is_the_recommendation(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script reads the same answer as a person."""
    assert _run(monkeypatch, "show", str(run), "--json") == 0
    printed = Recommendation.model_validate_json(capsys.readouterr().out)
    assert printed == Recommendation.model_validate_json((run / "recommendation.json").read_text())


def test_knee_of_a_run_is_the_runs_own(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run read as results from elsewhere gives the knee that its answer gives, from either of its forms."""
    answer = Recommendation.model_validate_json((run / "recommendation.json").read_text())
    assert answer.knee is not None
    for form in ([str(run)], [str(run / "stages.parquet"), "--trial", str(answer.knee_trial)]):
        assert _run(monkeypatch, "knee", *form, "--json") == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["verdict"], printed["knee"]["load"]) == ("resolved", answer.knee.load)
        assert tuple(printed["knee"]["interval"]) == answer.knee.interval


def test_the_exported_file_is_the_profile(run: Path) -> None:
    """What is deployed is what was measured."""
    answer = Recommendation.model_validate_json((run / "recommendation.json").read_text())
    assert answer.production is not None
    exported = yaml.safe_load((run / "export" / "production.engine.yaml").read_text())
    assert exported["max-num-seqs"] == answer.production.config.max_num_seqs
    assert exported["max-num-batched-tokens"] == answer.production.config.max_num_batched_tokens
    assert exported["gpu-memory-utilization"] == answer.production.config.gpu_memory_utilization


def test_export_writes_one_profile_where_it_is_asked_to(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the named profile in the named format is written."""
    out = tmp_path / "out"
    assert _run(monkeypatch, "export", str(run), "--profile", "protective", "--format", "vllm", "--out", str(out)) == 0
    assert {path.name for path in out.iterdir()} == {"protective.vllm.yaml", "runbook.md"}
    assert str(out / "protective.vllm.yaml") in capsys.readouterr().out


def test_a_line_of_arguments_is_told_where_its_figures_come_from(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line itself holds no words: whoever pastes it must not believe that it was measured on vLLM."""
    assert _run(monkeypatch, "export", str(run), "--format", "args", "--out", str(tmp_path / "out")) == 0
    told = capsys.readouterr().err
    assert "measured on the built-in engine, not on vLLM" in told
    assert "name the folder or hub id vLLM is to load" in told


def test_report_can_be_written_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that was deleted or is from an older version is one command away."""
    (run / "report.html").unlink()
    assert _run(monkeypatch, "report", str(run)) == 0
    assert (run / "report.html").stat().st_size > 100_000


def test_no_answer_is_exit_1_with_the_reason_and_no_production_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that deploys what it finds deploys nothing."""
    failed = Failed(kind=FailureKind.OOM_STARTUP, detail="24 of 22 GiB free")
    monkeypatch.setattr(workers, "Workers", lambda _: _Pool(fails=lambda _: failed))
    assert _run(monkeypatch, "tune", "embedded", "--trials", "3", "--runs", str(tmp_path)) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("no_feasible_config: ")
    assert "24 of 22 GiB free" in printed.err
    assert not list(tmp_path.rglob("production.*"))
    assert (tmp_path / "embedded-chat" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tune",), "nothing is named to tune"),
        (("tune", "--trials", "5"), "nothing is named to tune"),
        (("tune", "embeded"), "did you mean 'embedded'"),
        (("tune", "nothing.yaml"), "nothing.yaml cannot be read: No such file"),
        (("tune", "embedded", "--workload", "chatt"), "did you mean 'chat'"),
        (("tune", "embedded", "--engine", "vlm"), "engine.name"),
        (("tune", "embedded", "--slo-itl-p95", "50"), "write digits and a unit"),
        (("tune", "embedded", "--budget", "-5m"), "below zero"),
        (("tune", "embedded", "--trials", "1"), "greater than or equal to 3"),
        (("tune", "embedded", "--name", "../elsewhere"), "name"),
        (("tune", "--model", "./nowhere"), "has no config.json"),
        (("tune", "--model", "/nowhere/model"), "has no config.json"),
        (("show", "nowhere"), "no run here"),
        (("report", "nowhere"), "no run here"),
        (("export", "nowhere"), "no run here"),
    ],
)
def test_bad_input_is_exit_2_and_one_readable_line(
    arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody reads a traceback for a typing mistake."""
    assert _run(monkeypatch, *arguments) == 2
    printed = capsys.readouterr().err
    assert told in printed
    assert all(line.startswith("error: ") for line in printed.splitlines())


def test_another_model_does_not_inherit_the_embedded_ones_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--model` alone tunes that model on this machine, not on 128 MiB of it with somebody else's limits."""
    (tmp_path / "config.json").write_text("{}")
    seen: list[TuningJob] = []

    def keep(job: TuningJob, _placement: Placement, *, as_json: bool) -> None:
        assert not as_json
        seen.append(job)

    monkeypatch.setattr("tuner.commands.tune.print_plan", keep)
    assert _run(monkeypatch, "tune", "--model", str(tmp_path), "--dry-run") == 0
    (job,) = seen
    assert job.model == str(tmp_path.resolve())
    assert (job.engine.device_memory, job.engine.cpus, job.engine.fixed.max_model_len, job.slo) == (None,) * 4


def test_a_dry_run_starts_nothing_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan costs nothing and leaves nothing."""
    assert _run(monkeypatch, "tune", "embedded", "--dry-run", "--json", "--runs", str(tmp_path / "runs")) == 0
    assert json.loads(capsys.readouterr().out)["num_study_launches"] == 9
    assert not (tmp_path / "runs").exists()


def test_help_does_not_wait_for_torch_ray_or_optuna() -> None:
    """The command line answers at once."""
    script = (
        "import sys\nfrom tuner.__main__ import app\n"
        "print(sorted({'torch', 'ray', 'optuna', 'pandas', 'plotly', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert ended.stdout.strip() == "[]"


def _stop_after(num_stages: int) -> Reshape:
    """The curve, and Ctrl-C when that many stages were made."""
    made = itertools.count(1)

    def reshape(stage: StageRecord) -> StageRecord:
        if next(made) == num_stages:
            signal.raise_signal(signal.SIGINT)
        return _saturating(stage)

    return reshape


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run that its user stopped with Ctrl-C in its second trial."""
    monkeypatch.setattr(workers, "Workers", lambda _: _Pool(reshape=_stop_after(13)))
    assert _run(monkeypatch, "tune", "embedded", "--trials", "4", "--runs", str(tmp_path)) == 130
    run = tmp_path / "embedded-chat"
    said = capsys.readouterr().err
    assert "Ctrl-C once more stops at once" in said
    assert f"kneetune tune --resume {run}" in said
    return run


def test_ctrl_c_finishes_the_stage_and_says_how_to_go_on(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopping costs nothing that was measured: the run goes on after the very stage, to an answer."""
    assert _run(monkeypatch, "show", str(stopped)) == 1
    said = capsys.readouterr().out
    assert "no answer yet: 1 launches measured" in said
    assert "best so far" in said
    assert said.splitlines()[-1] == f"next        kneetune tune --resume {stopped}"
    pool = _Pool(reshape=_saturating)
    monkeypatch.setattr(workers, "Workers", lambda _: pool)
    assert _run(monkeypatch, "tune", "--resume", str(stopped)) == 0
    assert pool.launched[0].number == 1
    assert pool.stages_made[0] == (1, len(pool.launched[0].kept_stages))
    assert pool.launched[0].kept_stages
    assert _run(monkeypatch, "show", str(stopped)) == 0


def test_resume_refuses_another_job_and_names_what_to_leave_out(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is never half one workload and half another."""
    assert _run(monkeypatch, "tune", "--resume", str(stopped), "--workload", "chat-short", "--seed", "3") == 2
    said = capsys.readouterr().err
    assert "--workload" in said
    assert "--seed" in said


def test_resume_refuses_what_is_not_as_it_was_and_names_both(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures of two engine versions or two machines are not one answer."""
    file = stopped / "job.yaml"
    document = yaml.safe_load(file.read_text())
    document["provenance"]["engine_version"] = "0.0.9"
    document["provenance"]["packages"]["torch"] = "1.0"
    file.write_text(yaml.safe_dump(document))
    assert _run(monkeypatch, "tune", "--resume", str(stopped)) == 2
    said = capsys.readouterr().err
    assert "engine_version was 0.0.9, is " in said
    assert "torch was 1.0, is " in said


def test_a_run_is_written_by_one_process_at_a_time(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two that go on with one run would measure each other and mix their figures; cleaning keeps off too."""
    with RunStore.open(stopped).locked():
        assert _run(monkeypatch, "tune", "--resume", str(stopped)) == 2
        assert f"process {os.getpid()}" in capsys.readouterr().err
        assert _run(monkeypatch, "clean", str(stopped.parent)) == 0
        assert "left alone" in capsys.readouterr().out
    assert _run(monkeypatch, "clean", str(stopped)) == 0
    assert "0 engines ended" in capsys.readouterr().out
    assert _run(monkeypatch, "clean", str(stopped / "nowhere")) == 2


def test_more_budget_goes_on_with_a_run_that_had_its_answer(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants it surer adds trials to what is there."""
    before = len(RunStore.open(run).trials())
    assert _run(monkeypatch, "tune", "--resume", str(run), "--trials", "7") == 0
    store = RunStore.open(run)
    assert store.job().budget.trials == 7
    assert len(store.trials()) > before


def test_how_much_is_logged_is_asked_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever hunts a fault turns the log up; a level that is none is told which there are."""
    assert _run(monkeypatch, "--log-level", "debug", "show", str(run)) == 0
    assert _run(monkeypatch, "--log-level", "loud", "show", str(run)) == 2
    assert "warning" in capsys.readouterr().err


def test_a_run_on_vllm_ends_with_vllms_own_command() -> None:
    """The last line of an answer starts the engine that was tuned."""
    answer = resolved_run().recommendation
    on_vllm = answer.model_copy(update={"provenance": answer.provenance.model_copy(update={"engine": "vllm"})})
    assert answer_lines(on_vllm, Path("runs/x"))[-1].endswith("vllm serve --config runs/x/export/production.vllm.yaml")
