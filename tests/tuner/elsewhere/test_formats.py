"""Each tool's files are read for what they are, and what they do not hold is unknown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.elsewhere import samples
from tuner.elsewhere.files import ElsewhereLadder, read_ladder
from tuner.elsewhere.stage import Axis, reasons_to_leave_out
from tuner.inputs import InputError


def _written(folder: Path, results: Iterable[dict[str, Any]]) -> list[Path]:
    paths = []
    for number, result in enumerate(results):
        paths.append(folder / f"r{number}.json")
        paths[-1].write_text(json.dumps(result))
    return paths


def _csv(folder: Path, text: str) -> ElsewhereLadder:
    path = folder / "results.csv"
    path.write_text(text)
    return read_ladder([path])


def test_vllm_files_are_one_ladder(tmp_path: Path) -> None:
    """One file a concurrency, as the tool leaves them, is one closed loop with its p95s in ms."""
    ladder = read_ladder(_written(tmp_path, map(samples.vllm, samples.CONCURRENCIES)))
    stage = ladder.stages[3]

    assert ladder.axis is Axis.CONCURRENCY
    assert [each.load for each in ladder.stages] == list(samples.CONCURRENCIES)
    assert (stage.ttft_p95_ms, stage.itl_p95_ms, stage.num_completed) == (160.0, 28.0, 220)
    assert stage.num_preemptions is None
    assert not any(map(reasons_to_leave_out, ladder.stages))


@pytest.mark.parametrize("layout", ["json lines", "list"])
def test_vllm_appends_and_sweeps(tmp_path: Path, layout: str) -> None:
    """`--append-result` writes a line a run, a sweep a list: warm-ups, failed runs and copies are no stages."""
    results: list[dict[str, Any]] = [samples.vllm(n, run_number=0) for n in samples.CONCURRENCIES]
    results.append(samples.vllm(4, run_number=-1))
    results.append({"run_number": 0, "error_type": "RuntimeError", "error": "no server", "bench_overrides": {}})
    path = tmp_path / "all.json"
    path.write_text("\n".join(map(json.dumps, results)) if layout == "json lines" else json.dumps(results))
    ladder = read_ladder([path, *_written(tmp_path, results[:2])])

    assert [each.load for each in ladder.stages] == list(samples.CONCURRENCIES)
    assert any("the run failed: no server" in note for note in ladder.notes)


def test_vllm_sweeps_of_several_configs_are_not_mixed(tmp_path: Path) -> None:
    """Two engine configs in one summary are two ladders, not one with repeats."""
    paths = _written(tmp_path, [samples.vllm(4, **{"max-num-seqs": 64}), samples.vllm(8, max_num_seqs=128)])

    with pytest.raises(InputError, match=r"max_num_seqs is 64 in .*r0\.json and 128"):
        read_ladder(paths)


def test_vllm_sweep_folder_is_read_from_its_summary(tmp_path: Path) -> None:
    """The folder a sweep leaves is enough: its summary.csv holds every run, with vLLM's own column names."""
    columns = ("request_rate", "max_concurrency", "completed", "failed", "output_throughput", "p95_ttft_ms")
    rows = [",".join(str(samples.vllm(n)[name]) for name in columns) for n in samples.CONCURRENCIES]
    (tmp_path / "summary.csv").write_text("\n".join([",".join(columns), *rows]))
    ladder = read_ladder([tmp_path])

    assert [each.load for each in ladder.stages] == list(samples.CONCURRENCIES)
    assert ladder.stages[0].ttft_p95_ms == 20


def test_a_folder_of_vllm_results_is_one_ladder(tmp_path: Path) -> None:
    """`--result-dir` is enough; what the benchmark writes for a dashboard beside a result is not taken for one."""
    _written(tmp_path, map(samples.vllm, samples.CONCURRENCIES))
    (tmp_path / "r0.pytorch.json").write_text("[]")

    assert [each.load for each in read_ladder([tmp_path]).stages] == list(samples.CONCURRENCIES)
    (tmp_path / "config.json").write_text('{"architectures": []}')
    with pytest.raises(InputError, match=r"config\.json: its keys \(architectures …\) are of no format"):
        read_ladder([tmp_path])


def test_a_folder_without_results_says_what_would_do(tmp_path: Path) -> None:
    """A wrong folder is told, with all that would be read."""
    with pytest.raises(InputError, match=r"no results found in this folder.*kneetune bench.*vllm bench serve"):
        read_ladder([tmp_path])


def test_an_unlimited_rate_is_never_a_point(tmp_path: Path) -> None:
    """A burst that drains does not bend the curve, whichever tool sent it: it is left out aloud."""
    burst = samples.guidellm_benchmark({"type_": "throughput", "max_concurrency": 512}, 90)
    paced = [samples.guidellm_benchmark({"type_": "constant", "rate": r}, 1 / (0.2 - r / 100)) for r in (2.0, 5.0)]
    vllm = read_ladder(_written(tmp_path, [samples.vllm(8), samples.vllm(None)]))
    guidellm = read_ladder(_written(tmp_path, [samples.guidellm(burst, *paced)]))

    for ladder in (vllm, guidellm):
        assert [math.isinf(s.load) for s in ladder.stages if reasons_to_leave_out(s)] == [True]
        assert any("unlimited" in note for note in ladder.notes)


def test_failed_requests_make_a_stage_invalid(tmp_path: Path) -> None:
    """One request of a hundred may fail; two are a reason that names them."""
    ladder = read_ladder(_written(tmp_path, [samples.vllm(2, completed=99, failed=1), samples.vllm(4, failed=9)]))

    assert reasons_to_leave_out(ladder.stages[0]) == []
    assert reasons_to_leave_out(ladder.stages[1]) == ["9 of 149 requests failed, more than 1%"]


def test_a_closed_loop_must_hold_its_concurrency(tmp_path: Path) -> None:
    """A stage that mostly filled and drained has throughput of another load: |N - X R| / N must be under 10 %."""
    drained = samples.vllm(64, mean_e2el_ms=samples.e2e_ms(64) * 0.85)
    held = samples.vllm(32, mean_e2el_ms=samples.e2e_ms(32) * 0.95)
    ladder = read_ladder(_written(tmp_path, [drained, held]))

    assert "54.4 requests in flight on average, not 64" in reasons_to_leave_out(ladder.stages[0])[0]
    assert reasons_to_leave_out(ladder.stages[1]) == []


def test_an_open_loop_held_by_its_cap_is_no_open_loop(tmp_path: Path) -> None:
    """Where the client held requests back, the rate was not what was offered."""
    ladder = read_ladder(_written(tmp_path, [samples.vllm(8, request_rate=50.0), samples.vllm(4, request_rate=1.0)]))

    assert ladder.axis is Axis.REQUEST_RATE
    assert "at a cap of 8" in reasons_to_leave_out(ladder.stages[0])[0]
    held = samples.vllm(4, request_rate=1.0, max_concurrency=100)
    assert reasons_to_leave_out(read_ladder(_written(tmp_path, [held])).stages[0]) == []


def test_mixed_loads_are_an_error_that_names_both(tmp_path: Path) -> None:
    """Concurrency and rate on one axis would be a curve of nothing."""
    with pytest.raises(InputError, match=r"r0\.json has 8 concurrent requests, .*r1\.json 2.5 requests/s"):
        read_ladder(_written(tmp_path, [samples.vllm(8), samples.vllm(None, request_rate=2.5)]))


def test_a_mean_is_not_a_p95(tmp_path: Path) -> None:
    """What a tool gives as a mean over each request never passes for the tail of single gaps."""
    report = samples.guidellm(samples.guidellm_benchmark({"type_": "concurrent", "streams": 4}, 4))
    guidellm = read_ladder(_written(tmp_path, [report]))
    vllm = read_ladder(_written(tmp_path, [samples.vllm(4, p95_itl_ms=None, mean_itl_ms=5.0)]))
    packed = samples.aiperf(4, inter_chunk_latency={"unit": "ms", "p95": 30.0, "count": 900})
    aiperf = read_ladder(_written(tmp_path, [packed]))

    assert [each.stages[0].itl_p95_ms for each in (guidellm, vllm, aiperf)] == [None, None, None]
    assert guidellm.stages[0].ttft_p95_ms == 80
    assert any("mean over each request" in note for note in guidellm.notes)


def test_guidellm_sweep_is_an_open_loop(tmp_path: Path) -> None:
    """A sweep's first benchmark, one request at a time, does not make its rates a mixture."""
    paced = [samples.guidellm_benchmark({"type_": "poisson", "rate": rate}, 2 * rate) for rate in (1.0, 2.0, 4.0)]
    report = samples.guidellm(samples.guidellm_benchmark({"type_": "synchronous"}, 1), *paced)
    ladder = read_ladder(_written(tmp_path, [report]))

    assert ladder.axis is Axis.REQUEST_RATE
    assert [(each.load, each.in_flight) for each in ladder.stages] == [(1, 2), (2, 4), (4, 8)]
    with pytest.raises(InputError, match="version 1"):
        read_ladder(_written(tmp_path, [samples.guidellm(version=1)]))


def test_aiperf_runs_are_stages(tmp_path: Path) -> None:
    """One export a folder; the warm-up's load is not the stage's; chunks of one token each are ITL."""
    for n in samples.CONCURRENCIES:
        (tmp_path / f"concurrency_{n}").mkdir()
        (tmp_path / f"concurrency_{n}" / "profile_export_aiperf.json").write_text(json.dumps(samples.aiperf(n)))
    ladder = read_ladder([tmp_path])

    assert sorted(each.load for each in ladder.stages) == list(samples.CONCURRENCIES)
    assert {each.itl_p95_ms for each in ladder.stages} == {30.0}
    assert not any(map(reasons_to_leave_out, ladder.stages))


def test_aiperf_rates_and_broken_runs(tmp_path: Path) -> None:
    """A rate is an open loop, an incomplete run says so, another unit or phase is not guessed at."""
    rate = samples.aiperf(4, phase={"type": "poisson", "rate": 2.5})
    cut = samples.aiperf(8, phase={"type": "constant", "rate": 5.0}, is_complete=False, incomplete_reason="stalled")
    ladder = read_ladder(_written(tmp_path, [rate, cut]))

    assert ladder.axis is Axis.REQUEST_RATE
    assert reasons_to_leave_out(ladder.stages[1]) == ["the run is incomplete: stalled"]
    seconds = samples.aiperf(4, time_to_first_token={"unit": "s", "p95": 0.2})
    with pytest.raises(InputError, match="time_to_first_token: unit is 's', not 'ms'"):
        read_ladder(_written(tmp_path, [seconds]))
    with pytest.raises(InputError, match="type is 'fixed_schedule'"):
        read_ladder(_written(tmp_path, [samples.aiperf(4, phase={"type": "fixed_schedule"})]))


def test_csv_is_read_with_its_units(tmp_path: Path) -> None:
    """Semicolons, empty cells, columns of no concern and a byte order mark are what spreadsheets write."""
    header = "\ufeffconcurrency;output_throughput;p95_ttft_ms;num_preemptions;p99_ttft_ms;host"
    ladder = _csv(tmp_path, f"{header}\n1;100;12.5;0;20;a\n2;190;;;;a\n")

    assert [each.ttft_p95_ms for each in ladder.stages] == [12.5, None]
    assert [each.num_preemptions for each in ladder.stages] == [0, None]


@pytest.mark.parametrize(
    ("header", "meant"),
    [
        ("concurrency,throughput", "output_throughput"),
        ("concurrency,output_throughput,ttft_p95_ms", "p95_ttft_ms"),
        ("concurrency,output_throughput,p95_ttft", "p95_ttft_ms"),
        ("concurrency,output_throughput,p95_ttft_s", "p95_ttft_ms"),
        ("concurrency,output_throughput,p95_e2el_ms", "p95_e2e_ms"),
        ("concurrency,output_throughput,preemptions", "num_preemptions"),
        ("concurency,output_throughput", "concurrency"),
        ("max_concurrency,output_throughput", "concurrency"),
        ("users,output_throughput", "concurrency"),
        ("qps,output_throughput", "request_rate"),
    ],
)
def test_near_spellings_are_refused_with_a_hint(tmp_path: Path, header: str, meant: str) -> None:
    """A column that is nearly right, or in another unit, is not silently ignored."""
    with pytest.raises(InputError, match=repr(meant)):
        _csv(tmp_path, f"{header}\n1,100{',5' * (header.count(',') - 1)}\n")


@pytest.mark.parametrize("column", ["p99_ttft_ms", "mean_ttft_ms", "p50_itl_ms", "input_throughput", "median_e2e_ms"])
def test_other_figures_are_not_near_spellings(tmp_path: Path, column: str) -> None:
    """Another statistic beside ours is no mistake."""
    assert len(_csv(tmp_path, f"concurrency,output_throughput,{column}\n1,100,5\n").stages) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("concurrency,output_throughput\n1,fast\n", "row 2: output_throughput is 'fast', not a number"),
        ("concurrency,output_throughput\n0,100\n", "row 2: concurrency is '0', it must be above 0"),
        ("concurrency,output_throughput\n1,-4\n", "output_throughput is -4"),
        ("concurrency,output_throughput\n1,100,7\n", "row 2 has 3 cells, the header 2"),
        ("concurrency,concurrency\n1,100\n", "occurs twice"),
        ("concurrency,request_rate,output_throughput\n1,2,100\n", "both concurrency and request_rate"),
        ("when,output_throughput\n1,100\n", "the column 'concurrency' \\(or 'request_rate'\\) is missing"),
    ],
)
def test_faults_name_the_place(tmp_path: Path, text: str, said: str) -> None:
    """Which row, which column, what would do."""
    with pytest.raises(InputError, match=said):
        _csv(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "neither JSON nor JSON lines"),
        ("a.json", "", "empty"),
        ("a.json", "[1, 2]", "no object in it"),
        ("a.json", '{"hello": 1}', r"its keys \(hello …\) are of no format"),
        ("a.json", json.dumps(samples.vllm(4) | {"output_throughput": "x"}), "output_throughput is 'x', not a number"),
        ("a.json", json.dumps(samples.vllm(4) | {"request_rate": 0}), "request_rate is 0, not above 0"),
        ("a.json", '{"aggregation_type": "sweep"}', "name each run's profile_export_aiperf.json"),
        ("a.xlsx", "x", "cannot tell its format"),
        ("a.parquet", "x", "not a parquet file"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, name: str, text: str, said: str) -> None:
    """A file that cannot be read says which one it is and what would do."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=said) as fault:
        read_ladder([path])
    assert str(path) in str(fault.value)
