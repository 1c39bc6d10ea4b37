"""One ladder on a server that is already running: what is refused first, what is found, what is left behind."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, sleep

import pytest
import yaml

from tests.fakes.server import Behaviour, running_stub
from tests.fakes.serving import ROOT, Serving, serving
from tuner.bench_answer import BenchAnswer
from tuner.first_request import check_first_request, judge
from tuner.inputs import InputError
from tuner.ladder_answer import AnswerVerdict
from tuner.load.workload import load_workload
from tuner.measure.prometheus import parse_snapshot
from tuner.measure.spec import Target
from tuner.records import RequestRecord
from tuner.store import kept_stages

BASE_S, SLOPE_S = 0.02, 0.012
"""Of the known engine: a step with n running requests takes BASE + SLOPE n."""

KNEE = 4.5 * BASE_S / SLOPE_S
LAW = {
    "description": "20 ms a step and 12 ms a request",
    "max_model_len": 2048,
    "dtype": "float32",
    "step_time": {"combine": "sum", "base_s": BASE_S, "decode_token_s": SLOPE_S, "prefill_token_s": SLOPE_S / 32},
    "memory": {
        "total_bytes": 10**9,
        "weights_bytes": 1000,
        "activation_bytes_per_token": 1,
        "kv_bytes_per_token": 1000,
    },
}
WORKLOAD = {
    "input_len": {"kind": "fixed", "tokens": 32},
    "output_len": {"kind": "uniform", "low": 4, "high": 10},
}


def _record(**seen: object) -> RequestRecord:
    values = {"index": 0, "intended_s": 0.0, "sent_s": 0.0, "first_token_s": 0.1, "finished_s": 1.0}
    lengths = {"num_prompt_tokens": 1000, "num_output_tokens": 2048, "asked_output_tokens": 2048}
    return RequestRecord.model_validate(values | lengths | seen)


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ({"num_prompt_tokens": 5128}, ("1000", "5128")),
        ({"num_output_tokens": 300}, ("2048", "300", "ignore_eos")),
        ({"error": "HTTP 400: too long"}, ("HTTP 400: too long",)),
        ({"token_source": "chunks"}, ("include_usage",)),
    ],
)
def test_a_workload_that_is_not_served_as_asked_is_refused_before_it_is_measured(
    seen: dict[str, object], told: tuple[str, ...]
) -> None:
    """Ten minutes of stages that count other tokens than were sent are ten minutes lost, or a wrong answer."""
    with pytest.raises(InputError) as raised:
        judge(_record(**seen), sent_prompt_tokens=1000, url="http://s:1", tell=lambda _: None)
    assert all(word in str(raised.value) for word in told)


def test_a_few_tokens_more_are_told_and_accepted() -> None:
    """A tokenizer that adds its special tokens is no reason to refuse: the server's count is used."""
    told: list[str] = []
    judge(_record(num_prompt_tokens=1027), sent_prompt_tokens=1000, url="http://s:1", tell=told.append)
    assert ["1027" in text and "1000" in text for text in told] == [True]


async def test_the_first_request_carries_what_all_others_carry() -> None:
    """A probe that is sampled otherwise would prove nothing of the stages."""
    async with running_stub(Behaviour()) as stub:
        target = Target(endpoint=stub.endpoint, model="m", max_model_len=512)
        await check_first_request(target, load_workload("chat-short"), seed=7, tell=lambda _: None)
    (body, *_) = stub.bodies
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0.0
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert 64 <= len(body["prompt"]) <= 160


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A real server whose step times are known."""
    law = tmp_path_factory.mktemp("law") / "known.yaml"
    law.write_text(yaml.safe_dump(LAW), encoding="utf-8")
    command = [sys.executable, "-m", "engine", "serve", "embedded", "--port", "0", "--executor", "simulated"]
    with serving([*command, "--law", str(law), "--max-num-seqs", "64"]) as server:
        yield server


def _bench_command(server: Serving, out: Path, *options: str) -> list[str]:
    workload = out.parent / "short.yaml"
    workload.write_text(yaml.safe_dump(WORKLOAD), encoding="utf-8")
    head = [sys.executable, "-m", "tuner", "bench", server.url, "--workload", str(workload), "--out", str(out)]
    return [*head, "--time", "1s", *options]


def test_the_knee_of_an_engine_whose_law_is_known(known: Serving, tmp_path: Path) -> None:
    """The whole way, over real HTTP: what `kneetune bench` calls the knee is where the law has it."""
    out = tmp_path / "out"
    made = subprocess.run(
        _bench_command(known, out, "--max-load", "16", "--json"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    answer = BenchAnswer.model_validate_json(made.stdout)
    assert answer == BenchAnswer.model_validate_json((out / "bench.json").read_text())
    assert answer.verdict is AnswerVerdict.RESOLVED
    assert answer.knee is not None
    assert answer.knee.load is not None
    # A bisecting step between two rungs of a doubling ladder is half a doubling.
    assert abs(math.log2(answer.knee.load / KNEE)) <= 1.0
    assert _power(answer.knee.load) >= 0.85 * _power(KNEE)
    assert answer.operating_point is None or answer.operating_point.load < answer.knee.load
    assert (answer.fence, answer.fence_source) == (64, "told")
    assert answer.server.simulated
    assert answer.prefix_cache == "reset"
    assert known.process.poll() is None
    left = {path.name for path in out.iterdir()}
    assert left == {"stages.jsonl", "requests.parquet", "memory.parquet", "bench.json", "report.html"}
    assert len((out / "stages.jsonl").read_text().splitlines()) == len(answer.stages)
    assert "Simulated" in (out / "report.html").read_text()


def _power(load: float) -> float:
    """Generalised power of the known curve."""
    return float((load / (BASE_S + SLOPE_S * load)) ** 5.5 / load)


def test_ctrl_c_keeps_what_there_is_and_the_server_goes_on(known: Serving, tmp_path: Path) -> None:
    """Who has seen enough does not lose it; twice, and it ends at once with what was whole."""
    out = tmp_path / "out"
    process = subprocess.Popen(_bench_command(known, out), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        deadline_s = perf_counter() + 60
        while not (out / "stages.jsonl").is_file() and perf_counter() < deadline_s:
            sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    answer = BenchAnswer.model_validate_json((out / "bench.json").read_text())
    assert answer.interrupted
    assert 1 <= len(answer.stages) < 5
    assert any("interrupted after" in warning for warning in answer.warnings)
    assert printed.startswith("too_few_stages: ")
    assert known.process.poll() is None


def test_sigterm_in_a_stage_keeps_those_that_were_whole(known: Serving, tmp_path: Path) -> None:
    """A machine that goes down takes one stage with it and not the ladder, and the end is that of an interrupt."""
    out = tmp_path / "out"
    process = subprocess.Popen(_bench_command(known, out), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        deadline_s = perf_counter() + 60
        while len(kept_stages(out)) < 2 and perf_counter() < deadline_s:
            sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    answer = BenchAnswer.model_validate_json((out / "bench.json").read_text())
    assert answer.interrupted
    assert list(answer.stages) == kept_stages(out)
    assert len(answer.stages) >= 2
    assert known.process.poll() is None


def _metrics(server: Serving) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:  # noqa: S310 - our own server
        return str(answer.read().decode())


def test_ctrl_c_twice_ends_a_stage_at_once(known: Serving, tmp_path: Path) -> None:
    """A stage of half a minute is not waited for by somebody in a hurry; what was whole is kept."""
    out = tmp_path / "out"
    command = [*_bench_command(known, out), "--loads", "1,2,4"]
    command[command.index("1s")] = "100s"
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "at most" in line:  # the last line before the first stage
                break
        while not parse_snapshot(_metrics(known), at_s=0.0).running:
            sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert "once more" in next(process.stderr)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert BenchAnswer.model_validate_json((out / "bench.json").read_text()).stages == ()
    assert (out / "report.html").is_file()
    assert known.process.poll() is None
