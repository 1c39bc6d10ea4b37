"""Every mistake a person can make on the command line ends in a line that says what to do."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.workers import FakeWorkers
from tuner import __main__ as cli
from tuner import workers
from tuner.inputs import read_preset
from tuner.store import RunStore
from tuner.yaml_file import plain_data

JOB = (Path(cli.__file__).parents[1] / "search_spaces" / "jobs" / "embedded.yaml").read_text(encoding="utf-8")


def _said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `kneetune ARGUMENTS` says on stderr; it must end with exit code 2, by itself and without a traceback."""
    monkeypatch.setattr(sys, "argv", ["kneetune", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2, said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("seed: 0", "seed: !!timestamp x", ("line ", "'x'", "mend it")),
        ("seed: 0", "seed: 2020-99-99", ("line ", "2020-99-99", "mend it")),
        ("seed: 0", "seed: !!bool x", ("line ", "'x'", "mend it")),
        ("seed: 0", "seed: !!int ''", ("line ", "mend it")),
        ("seed: 0", f"seed: {'9' * 5000}", ("line ", "999", "mend it")),
        ("seed: 0", "seed: 0\nseed: 1", ("line ", "'seed' stands twice", "mend it")),
        ("seed: 0", "seed: [", ("line ", "mend it")),
        ("seed: 0", f"seed: {'[' * 3000}", ("too deeply", "flatten")),
        ("seed: 0", "seed: \0", ("not YAML", "plain text")),
        ("seed: 0", "seed: -1", ("seed", "-1", "greater than or equal to 0")),
        ("seed: 0", "seed: 0\n1: 2", ("1", "quotes")),
        ("time: 10m", "time: 0s", ("budget.time", "'0s'", "above zero")),
        ("time: 10m", "time: 9999h", ("budget.time", "9999h", "at most 8784h")),
        ("trials: 9", "trials: 0", ("budget.trials", "0", "greater than or equal to 3")),
        ("name: embedded-chat", "name: a/b", ("name", "'a/b'", "letters, digits")),
        ("model: embedded", "model: ''", ("model", "must not be empty")),
        ("cpus: 1", "cpus: 0", ("engine.cpus", "0", "greater than or equal to 1")),
        ("device_memory: 128M", "device_memory: 12Q", ("engine.device_memory", "'12Q'", "256M")),
        ("device_memory: 128M", "law: h100.yaml", ("engine.law", "h100.yaml", "preset")),
        ("cpus: 1", "law: h100-8b", ("engine", "h100-8b", "leave device_memory out")),
        ("search_space: cpu", "search_space: 3", ("search_space", "3", "preset")),
        ("search_space: cpu", "search_space: gpuu", ("search_space", "'gpuu'", "did you mean 'gpu'")),
        ("kind: uniform, low: 384", "kind: unifrm, low: 384", ("burst.input_len", "'unifrm'", "'uniform'")),
        ("low: 384, high: 768", "low: 800, high: 768", ("low=800", "high=768", "swap them")),
        ("max_time: 4s", "max_time: 0.1s", ("min_time=1s", "max_time=0.1s", "at most")),
        ("max_model_len: 2048", "max_model_len: 12", ("200 tokens", "max_model_len=12", "raise max_model_len")),
        (JOB, "- 1\n", ("a list", "keys and values", "default")),
        (JOB, "", ("nothing", "keys and values", "default")),
    ],
)
def test_a_mistake_in_a_job_file(
    old: str,
    new: str,
    told: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The person who wrote it reads the place, the value and what would do, not a traceback."""
    file = tmp_path / "job.yaml"
    assert old in JOB
    file.write_text(JOB.replace(old, new, 1), encoding="utf-8")
    said = _said(monkeypatch, capsys, "plan", str(file))
    assert all(part in said for part in (str(file), *told)), said
    assert len(said) < 800


SPACE = """search_space:
  why: x
  parameters:
    max_num_seqs: {choices: [SEQS], why: x}
    max_num_batched_tokens: {choices: [64, 128], why: x}
    gpu_memory_utilization: {choices: [0.5, 0.9], why: x}
  cautious_start: {max_num_seqs: 4, max_num_batched_tokens: 64, gpu_memory_utilization: 0.5}
  conditions: ['CONDITION']
"""


@pytest.mark.parametrize(
    ("seqs", "condition", "told"),
    [
        ("", "max_num_seqs < 9", ("max_num_seqs.choices", "at least 1")),
        ("8, 4", "max_num_seqs < 9", ("[8, 4]", "must rise")),
        ("0, 4", "max_num_seqs < 9", ("max_num_seqs=0", "greater than or equal to 1")),
        ("4.5, 5", "max_num_seqs < 9", ("max_num_seqs=4.5", "valid integer")),
        ("200, 300", "max_num_seqs < 900", ("max_num_seqs=200", "change choices")),
        ("4, 8", "max_num_seq < 9", ("max_num_seq is no parameter", "max_num_seqs")),
        ("4, 8", "max_num_seqs <", ("max_num_seqs <",)),
        ("4, 8", "max_num_seqs / 0 > 1", ("division by zero", "mend it or leave it out")),
        ("4, 8", "watermark > 0.1", ("watermark", "engine.fixed")),
    ],
)
def test_a_mistake_in_a_search_space(
    seqs: str,
    condition: str,
    told: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A space is written by hand as well: the parameter, the value and the limit are named."""
    file = tmp_path / "job.yaml"
    space = SPACE.replace("SEQS", seqs).replace("CONDITION", condition)
    file.write_text(JOB.replace("search_space: cpu\n", space), encoding="utf-8")
    said = _said(monkeypatch, capsys, "plan", str(file))
    assert all(part in said for part in told), said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("plan", "nothing.yaml"), ("nothing.yaml", "YAML file")),
        (("plan", "embeded"), ("'embeded'", "did you mean 'embedded'")),
        (("plan", "/"), ("'/'", "default, embedded")),
        (("plan",), ("JOB.yaml", "--help")),
        (("tune", "--trails", "3"), ("--trails", "--trials")),
        (("tune", "embedded", "--trials", "x", "--dry-run"), ("--trials", "integer")),
        (("tune", "embedded", "--budget", "5", "--dry-run"), ("'5'", "10m")),
        (("tune", "embedded", "--runs", "/dev/null"), ("/dev/null", "--runs")),
        (("tune", "embedded", "--runs", "/proc/nowhere"), ("/proc/nowhere", "--runs")),
        (("tune", "--resume", "/nowhere"), ("/nowhere", "kneetune tune")),
        (("tune", "embedded", "--resume", "/nowhere"), ("leave out JOB", "--budget")),
        (("tune", "--seed", "1", "--resume", "/nowhere"), ("leave out --seed", "--budget")),
        (("show", "/nowhere"), ("/nowhere", "kneetune tune")),
        (("report", "/nowhere"), ("/nowhere", "kneetune tune")),
        (("export", "/nowhere"), ("/nowhere", "kneetune tune")),
        (("export", "/nowhere", "--format", "x"), ("'x'", "'engine'")),
        (("clean", "/nowhere"), ("/nowhere", "run's directory")),
        (("doctor", "x"), ("x", "--help")),
        (("foo",), ("foo", "--help")),
        (("--log-level", "x", "plan", "embedded"), ("'x'", "'warning'")),
    ],
)
def test_a_mistake_on_the_command_line(
    arguments: tuple[str, ...],
    told: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The word that is wrong is named, and the one that would do, or where to find it."""
    said = _said(monkeypatch, capsys, *arguments)
    assert all(part in re.sub(r"\s*│\s*", " ", said) for part in told), said


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was cut off at its start: what is damaged of it is up to the test."""
    job = cli.tune.load_job("embedded")
    store = RunStore.create(tmp_path, job, cli.tune.provenance(job))
    monkeypatch.setattr(workers, "Workers", lambda _: contextlib.nullcontext(FakeWorkers()))
    return store.path


def _damage(name: str, text: str) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        file = run / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    return do


@pytest.mark.parametrize(
    ("damage", "arguments", "told"),
    [
        (_damage("job.yaml", "a: 1"), ("show",), ("job.yaml", "kneetune tune")),
        (_damage("job.yaml", "a: ["), ("show",), ("job.yaml", "line ", "mend it")),
        (_damage("recommendation.json", "{"), ("show",), ("recommendation.json", "restore")),
        (_damage("recommendation.json", "{"), ("export",), ("recommendation.json", "restore")),
        (_damage("recommendation.json", "{}"), ("report",), ("recommendation.json", "restore")),
        (_damage("trials/0000/trial.json", '{"number": "x"}'), ("show",), ("trial.json", "restore")),
        (_damage("trials/0000/trial.json", "\xff"), ("tune", "--resume"), ("trial.json", "restore")),
        (_damage("note", ""), ("show", "--json"), ("no answer yet", "--resume")),
        (_damage("note", ""), ("export",), ("no answer yet", "--resume")),
        (_damage("note", ""), ("report",), ("no answer yet", "--resume")),
        (_damage("note", ""), ("tune", "--budget", "1", "--resume"), ("time", "'1'", "10m")),
        (_damage("note", ""), ("tune", "--trials", "1", "--resume"), ("trials", "1", "equal to 3")),
    ],
)
def test_a_run_that_is_damaged_or_not_done(
    damage: Callable[[Path], None],
    arguments: tuple[str, ...],
    told: tuple[str, ...],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Hours of measuring are not given up for a file: which one it is, and how to go on, is said."""
    damage(run)
    said = _said(monkeypatch, capsys, *arguments, str(run))
    assert all(part in said for part in told), said


@pytest.mark.parametrize("arguments", [("plan",), ("tune", "--dry-run")])
def test_a_rehearsal_says_so_before_it_begins(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for figures that no device will have given."""
    file = tmp_path / "job.yaml"
    text = re.sub(r" +(device_memory|cpus):.*\n", "", JOB).replace("name: builtin", "name: builtin\n  law: h100-8b")
    assert read_preset("jobs", "embedded") != plain_data(text)
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["kneetune", *arguments, str(file)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    assert "simulated: h100-8b" in printed.out
