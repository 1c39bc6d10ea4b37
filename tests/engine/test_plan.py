"""`python -m engine plan`: the calculation of a start, without the start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine import device_ledger
from engine.__main__ import main
from engine.config import EngineConfig
from engine.device_ledger import ledger_folder, locked_ledger
from engine.executor import torch as executor
from engine.executor.blueprint import Blueprint, blueprint
from engine.executor.torch import TorchExecutor
from engine.memory import DeviceMemory, KvLayout, MemoryReport, NoKvMemoryError, memory_budget
from engine.models.embedded.make import files
from engine.plan import MemoryPlan, memory_plan, table, with_blocks

MIB, GIB = 2**20, 2**30
_SMALL = ("--device", "cpu", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "128")
_CONFIG = EngineConfig(
    model="embedded",
    device="cpu",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=128,
    device_memory_bytes=96 * MIB,
    gpu_memory_utilization=0.5,
)


def _plan(*flags: str) -> int:
    return main(["plan", "embedded", *_SMALL, *flags])


def _held_by_another(num_bytes: int, device: str = "cpu-0") -> None:
    """Have the first process of this machine, which lives, claim so much."""
    with locked_ledger("cpu:0"):
        pass
    (ledger_folder() / f"{device}.claims").write_text(f"1 {device_ledger._start(1)} {num_bytes}\n")


def _calculated(config: EngineConfig, *, num_tokens: int, tokens_per_request: int | None) -> MemoryPlan:
    """A calculation whose KV blocks hold so many tokens, from a made-up measurement."""
    layout = KvLayout(block_size=16, block_bytes=MIB)
    total = GIB + num_tokens // 16 * MIB
    budget = memory_budget(
        total_bytes=total,
        free_bytes=total,
        requested_bytes=total,
        weights_bytes=GIB,
        activation_peak_bytes=0,
        request_buffers_bytes=0,
        non_torch_bytes=0,
    )
    report = MemoryReport(device="cpu", budget=budget, layout=layout, max_model_len=2048, peak_step="64 tokens")
    memory = DeviceMemory(total_bytes=total, free_bytes=total)
    measured = MemoryPlan(config=config, memory=memory, requested_bytes=total, report=report)
    return with_blocks(measured, report, tokens_per_request, ())


def test_the_plan_is_what_a_start_decides() -> None:
    """Whoever plans a deployment gets the blocks that the engine will have, byte for byte."""
    planned, started = memory_plan(_CONFIG), TorchExecutor(_CONFIG).resolved

    assert planned.num_blocks == started.num_gpu_blocks
    assert planned.report is not None
    assert planned.report.budget == started.memory
    assert planned.report.layout.block_bytes == started.kv_block_bytes


def test_planning_claims_nothing() -> None:
    """An engine can start while, and after, somebody plans in a notebook that stays open."""
    memory_plan(_CONFIG)
    assert not (ledger_folder() / "cpu-0.claims").exists()


def test_the_table_says_where_every_byte_goes(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of the calculation is there with its figure, in bytes and in words, and it adds up."""
    assert _plan("--device-memory", "96M", "--gpu-memory-utilization", "0.5", "--tokens-per-request", "50") == 0
    rows = {}
    for line in capsys.readouterr().out.splitlines():
        name, _, rest = line.strip().partition("  ")
        rows[name] = int(rest.split()[0].replace(",", "")) if rest else 0

    taken = ("- weights", "- activation peak", "- request buffers", "- non-torch")
    assert rows["total of cpu"] == rows["free now"] == 96 * MIB
    assert rows["requested: total x 0.5"] == 48 * MIB
    assert rows["= KV cache"] == 48 * MIB - sum(rows[name] for name in taken)
    assert rows["= blocks"] == rows["= KV cache"] // rows["/ a block of 16 tokens"]
    assert rows["tokens"] == 16 * rows["= blocks"]
    assert rows["requests of 128 tokens at once"] == rows["= blocks"] // 8
    assert rows["requests of 50 tokens at once"] == rows["= blocks"] // 4


def test_the_same_figures_are_there_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    """A script reads whether it starts, and with what."""
    assert _plan("--device-memory", "96M", "--json") == 0
    told = json.loads(capsys.readouterr().out)

    assert told["starts"]
    assert told["memory"]["free_bytes"] == told["memory"]["total_bytes"] == 96 * MIB
    assert told["num_tokens"] == 16 * told["num_blocks"] > 0
    assert told["fits"] == [{"tokens_per_request": 128, "num_requests": told["num_blocks"] // 8}]
    assert "64 tokens" in told["activation_peak_step"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--device-memory", "96M", "--gpu-memory-utilization", "0.22"), ["= short by", "would do is 0."]),
        (("--device-memory", "16M"), ["= short by", "at no gpu_memory_utilization", "smaller model"]),
        (("--device-memory", "22M", "--max-num-seqs", "2"), ["= short by", "gpu_memory_utilization"]),
    ],
)
def test_what_does_not_fit_says_by_how_much_and_the_way_out(
    flags: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is there all the same, the way out is the one an engine would name, and the exit code says it."""
    assert _plan(*flags) == 1
    out = capsys.readouterr().out
    for word in ("- weights", "= KV cache", "one request of 128 tokens", "does not fit: ", *words):
        assert word in out


def test_what_others_hold_is_said_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan beside a running engine names it, what is missing, and the share that is left."""
    _held_by_another(60 * MIB)
    assert _plan("--device-memory", "96M", "--gpu-memory-utilization", "0.5") == 1
    out = capsys.readouterr().out
    for figure in ("held by pid 1", "60.00 MiB", "36.00 MiB", "= short by", "12.00 MiB", "at most 0.37"):
        assert figure in out
    assert "weights" not in out


def test_every_core_of_a_server_must_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """With data parallelism the second core's device counts too, and it is named."""
    _held_by_another(60 * MIB, device="cpu-1")
    assert _plan("--device-memory", "96M", "--gpu-memory-utilization", "0.5") == 0
    assert _plan("--device-memory", "96M", "--gpu-memory-utilization", "0.5", "--data-parallel-size", "2") == 1
    assert "total of cpu:1" in capsys.readouterr().out


def test_more_sequences_than_the_blocks_hold_is_warned_of_with_both_figures() -> None:
    """77088 tokens hold 73 requests of 1050: a limit of 256 would preempt all day."""
    config = EngineConfig(model="m", max_num_seqs=256)
    calculated = _calculated(config, num_tokens=77088, tokens_per_request=1050)

    assert [fit.num_requests for fit in calculated.fits] == [77088 // 2048, 73]
    (warning,) = calculated.warnings
    assert "preemption-prone: max_num_seqs=256" in warning
    assert "73 requests of 1050 tokens" in warning
    assert f"warning: {warning}" in table(calculated)
    for quiet in (EngineConfig(model="m", max_num_seqs=73), EngineConfig(model="m", max_num_active_seqs=70)):
        assert _calculated(quiet, num_tokens=77088, tokens_per_request=1050).warnings == ()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-num-seqs", "0"), ["max_num_seqs=0"]),
        (("--max-model-len", "9999"), ["max_model_len=9999", "2048"]),
        (("--tokens-per-request", "129"), ["tokens_per_request=129", "max_model_len=128"]),
        (("--tokens-per-request", "0"), ["tokens_per_request=0"]),
        (("--executor", "simulated"), ["executor='simulated'"]),
    ],
)
def test_a_config_that_can_never_work_ends_with_2(
    flags: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input is told from memory that is short, with key and value."""
    assert _plan(*flags) == 2
    event = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert event["kind"] == "invalid_config"
    assert all(word in event["message"] for word in words)


def test_a_model_without_weights_is_planned_with_dummy_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether a model will fit can be known before its weights are downloaded: its config.json is enough."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(files()["config.json"]), **shape}))
    flags = ("--load-format", "dummy", "--device-memory", "64M", "--json")
    assert main(["plan", str(tmp_path), *_SMALL, *flags]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["memory"]["weights_bytes"] < MIB
    assert main(["plan", str(tmp_path), *_SMALL, "--device-memory", "64M"]) == 2


def test_a_config_file_of_a_server_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An exported file is checked as it is, its host and port with it."""
    file = tmp_path / "engine.yaml"
    file.write_text("model: embedded\nport: 8001\ndevice-memory: 96M\ngpu-memory-utilization: 0.5\nmax-num-seqs: 8\n")
    assert main(["plan", "--config", str(file), *_SMALL]) == 0
    assert "requested: total x 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"max_num_seqs": 64, "max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 2048, "max_model_len": 2048},
        {"kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16"},
    ],
)
def test_what_is_known_before_loading_is_never_more_than_what_is_measured(sizes: dict[str, object]) -> None:
    """No engine that would run is refused by the shape of its model, and weights are known to the byte."""
    config = replace(_CONFIG, device_memory_bytes=GIB, **sizes)  # type: ignore[arg-type]
    least, report = blueprint(config).least, memory_plan(config).report

    assert report is not None
    assert least.weights_bytes == report.budget.weights_bytes
    assert 0.2 * report.budget.activation_peak_bytes < least.activation_bytes <= report.budget.activation_peak_bytes
    assert 0 < least.request_buffers_bytes <= report.budget.request_buffers_bytes
    assert least.layout == report.layout


@pytest.mark.parametrize("override", [None, 64])
def test_what_can_never_fit_is_refused_before_it_takes_any_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: int | None
) -> None:
    """A mistyped number of sequences does not take the machine's memory to find out that it is too much."""

    def load(plan: Blueprint) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(executor, "ModelRunner", load)
    absurd = ("--max-num-seqs", "100000", "--max-num-batched-tokens", "100000", "--device-memory", "96M")
    blocks = () if override is None else ("--num-gpu-blocks-override", str(override))
    assert _plan(*absurd, *blocks) == 1
    out = capsys.readouterr().out
    for words in ("- weights", "nothing was loaded or run", "= short by", "at no gpu_memory_utilization"):
        assert words in out
    assert "smaller max_num_batched_tokens and max_num_seqs" in out

    config = replace(_CONFIG, max_num_seqs=100_000, max_num_batched_tokens=100_000, num_gpu_blocks_override=override)
    with pytest.raises(NoKvMemoryError, match="at no gpu_memory_utilization"):
        TorchExecutor(config)
