"""The exported config files, read back as the engines read them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import EngineConfig as ServedConfig
from tests.fakes.records import MIB, FakeRun, protective_profile, provenance, resolved_run, unresolved_run
from tests.fakes.workers import FakeWorkers
from tests.tuner.test_tuning import Silent
from tuner.answer import Profile, RunVerdict
from tuner.commands.export import warnings, write_exports
from tuner.export.context import ExportContext, ExportRefusedError
from tuner.export.engine_yaml import engine_yaml
from tuner.export.settings import flag
from tuner.export.vllm_yaml import vllm_args, vllm_env, vllm_yaml
from tuner.job import load_job
from tuner.store import RunStore
from tuner.tuning import run_tuning

EXPORTS = [engine_yaml, vllm_yaml]


def production_context(run: FakeRun | None = None, **changes: Any) -> ExportContext:
    """Production of the usual run; `changes` are to its engine config."""
    recommendation = (run or resolved_run()).recommendation
    assert recommendation.production is not None
    config = recommendation.production.config.model_copy(update=changes)
    return ExportContext(
        profile=recommendation.production.model_copy(update={"config": config}),
        recommendation=recommendation,
        run="chat-short",
        model="/models/qwen3",
        max_model_len=2048,
        device_memory_bytes=2048 * MIB,
        served_model_name="qwen3",
    )


def flags_of_an_old_loader(text: str) -> list[str]:
    """What a loader makes of the file that turns true into a bare flag and drops false."""
    flags: list[str] = []
    for key, value in yaml.safe_load(text).items():
        if value is True:
            flags.append(f"--{key}")
        elif value is not False:
            flags += [f"--{key}", str(value)]
    return flags


@pytest.mark.parametrize("export", EXPORTS)
def test_the_chosen_values_come_back(export: Callable[[ExportContext], str]) -> None:
    """An engine started from the file runs with the three values that were measured."""
    keys = yaml.safe_load(export(production_context()))

    assert (keys["max-num-seqs"], keys["max-num-batched-tokens"], keys["gpu-memory-utilization"]) == (20, 1024, 0.7)
    assert (keys["model"], keys["served-model-name"], keys["max-model-len"]) == ("/models/qwen3", "qwen3", 2048)


def test_the_engine_accepts_every_key() -> None:
    """The built-in engine knows each key of its file, and takes the config."""
    keys = yaml.safe_load(engine_yaml(production_context()))
    fields: dict[str, Any] = {}
    for key, value in keys.items():
        name = key.removeprefix("no-").replace("-", "_")
        fields["device_memory_bytes" if name == "device_memory" else name] = not key.startswith("no-") and value

    config = ServedConfig(**fields)

    assert config.device_memory_bytes == 2048 * MIB
    assert config.enable_chunked_prefill
    assert not config.enable_prefix_caching


def test_vllm_gets_every_key_whose_default_moves() -> None:
    """The same file means the same on another card or release."""
    keys = yaml.safe_load(vllm_yaml(production_context()))

    required = {"max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization", "max-model-len", "dtype"}
    assert required | {"enable-chunked-prefill", "no-enable-prefix-caching", "tensor-parallel-size"} <= keys.keys()
    assert "device-memory" not in keys
    assert None not in keys.values()


@pytest.mark.parametrize("export", EXPORTS)
def test_off_stays_off_in_a_loader_that_drops_false(export: Callable[[ExportContext], str]) -> None:
    """A feature that was off when measured is off when deployed, whatever the loader does with false."""
    text = export(production_context(enable_chunked_prefill=False, max_num_batched_tokens=2048))

    flags = flags_of_an_old_loader(text)

    assert "--no-enable-prefix-caching" in flags
    assert "--no-enable-chunked-prefill" in flags
    assert False not in yaml.safe_load(text).values()


def test_on_off_and_unset_differ() -> None:
    """Unset leaves the engine its default; it is neither on nor off."""
    assert flag("enable-x", on=True) == {"enable-x": True}
    assert flag("enable-x", on=False) == {"no-enable-x": True}
    assert flag("enable-x", on=None) == {}


@pytest.mark.parametrize("export", EXPORTS)
def test_sizes_are_plain_integers(export: Callable[[ExportContext], str]) -> None:
    """No release's idea of `16k` can change a value."""
    text = export(production_context(max_num_batched_tokens=16384, max_model_len=131072))

    assert "max-num-batched-tokens: 16384\n" in text
    assert "max-model-len: 131072\n" in text


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("verdict", [verdict for verdict in RunVerdict if verdict is not RunVerdict.RESOLVED])
def test_no_production_without_a_resolved_verdict(export: Callable[[ExportContext], str], verdict: RunVerdict) -> None:
    """A config that no knee backs does not get deployed as production; protective may still leave the run."""
    unresolved = unresolved_run(verdict).recommendation
    usual = production_context()

    def of(profile: Profile) -> ExportContext:
        return ExportContext(profile=profile, recommendation=unresolved, run="x", model="m", max_model_len=2048)

    with pytest.raises(ExportRefusedError, match=f"`{verdict}`"):
        export(of(usual.profile))
    assert yaml.safe_load(export(of(protective_profile())))["max-num-seqs"] == 12


def test_the_header_says_what_was_not_measured_on_vllm() -> None:
    """Nobody takes a figure of the built-in engine for one of vLLM; vLLM's own carry no such note."""
    run = resolved_run()
    on_vllm = run.recommendation.provenance.model_copy(update={"engine": "vllm", "engine_version": "0.32.0"})
    vllm_run = FakeRun(run.recommendation.model_copy(update={"provenance": on_vllm}), run.trials)

    assert "# NOTE: measured on the built-in engine, not on vLLM" in vllm_yaml(production_context())
    assert "NOTE" not in engine_yaml(production_context())
    assert "NOTE" not in vllm_yaml(production_context(vllm_run))
    assert "measured on vLLM, not on the built-in engine" in engine_yaml(production_context(vllm_run))


def test_the_header_carries_the_evidence() -> None:
    """Whoever finds the file later can judge it: knee, operating point, hardware, date, how to start."""
    header = engine_yaml(production_context()).split("\n\n")[0]

    assert all(line.startswith("#") for line in header.splitlines())
    for part in (
        "production profile of the run chat-short",
        "resolved",
        "22 concurrent requests (20 to 25)",
        "340 tok/s",
    ):
        assert part in header
    for part in ("2 cores, 8 GiB RAM", "2026-11-29", "python -m engine serve --config FILE"):
        assert part in header


@pytest.mark.parametrize("export", EXPORTS)
def test_text_from_outside_cannot_leave_the_header(export: Callable[[ExportContext], str]) -> None:
    """A reason with line breaks or control characters must not become a key, nor make the file unreadable."""
    run = resolved_run()
    reason = "bend\nmax-num-seqs: 9999\r\u2028served-model-name: x\x00\x1b"
    hostile = run.recommendation.model_copy(update={"reason": reason})
    context = production_context(FakeRun(hostile, run.trials))

    assert yaml.safe_load(export(context)) == yaml.safe_load(export(production_context()))


def test_simulated_and_unproven_are_said() -> None:
    """Made-up step times, or a burst that was not held, are on the file itself."""
    run = resolved_run()
    simulated = run.recommendation.model_copy(update={"provenance": provenance(simulated=True)})
    context = ExportContext(
        profile=protective_profile(passed=False), recommendation=simulated, run="x", model="m", max_model_len=2048
    )

    text = engine_yaml(context)

    assert "simulated" in text
    assert "did not pass its burst: 31 preemptions" in text


def test_the_built_in_engine_refuses_more_than_one_device() -> None:
    """A value the engine cannot honour is not dropped in silence."""
    for change in ({"quantization": "fp8"}, {"extra_args": ("--seed", "7")}):
        with pytest.raises(ExportRefusedError, match=next(iter(change))):
            engine_yaml(production_context(**change))
    with pytest.raises(ExportRefusedError, match="tensor_parallel_size=2"):
        engine_yaml(production_context(tensor_parallel_size=2))
    assert yaml.safe_load(vllm_yaml(production_context(tensor_parallel_size=2)))["tensor-parallel-size"] == 2


@pytest.mark.parametrize("export", EXPORTS)
def test_every_parameter_that_is_set_is_written_and_no_other(export: Callable[[ExportContext], str]) -> None:
    """A deployed engine runs with all that was tuned, and keeps its own values where nothing was."""
    further = {
        "kv_cache_dtype": "fp8",
        "long_prefill_token_threshold": 512,
        "max_num_active_seqs": 12,
        "max_num_scheduled_tokens": 1000,
        "watermark": 0.01,
    }
    keys = yaml.safe_load(export(production_context(**further, scheduler_reserve_full_isl=False)))

    assert keys.items() >= {name.replace("_", "-"): value for name, value in further.items()}.items()
    assert keys["no-scheduler-reserve-full-isl"] is True
    assert not yaml.safe_load(export(production_context())).keys() & {"watermark", "no-scheduler-reserve-full-isl"}


def _line(context: ExportContext) -> list[str]:
    text = vllm_args(context)
    assert text.count("\n") == 1
    return shlex.split(text)


def test_the_line_says_what_the_file_says() -> None:
    """Whoever deploys by arguments gets the same engine, and a shell changes none of them."""
    further = {"speculative_config": '{"method": "it\'s; $HOME"}', "extra_args": ("--max-lora-rank", "16")}
    context = production_context(**further)
    model, *line = _line(context)
    assert model == "/models/qwen3"
    assert ["--model", model, *line] == flags_of_an_old_loader(vllm_yaml(context))


@pytest.mark.parametrize("value", [True, False, None])
def test_on_off_and_unset_are_three_files(value: bool | None) -> None:  # noqa: FBT001  (a parameter of the test)
    """A switch nobody set keeps the engine's default; off is not the same as unset."""
    told = flags_of_an_old_loader(vllm_yaml(production_context(enforce_eager=value)))
    found = [flag for flag in told if flag.endswith("enforce-eager")]
    assert found == {True: ["--enforce-eager"], False: ["--no-enforce-eager"], None: []}[value]


def test_further_arguments_become_keys_and_what_no_file_can_hold_is_refused() -> None:
    """A flag that is silently lost on the way into a file is not in force in production."""
    given = ("--enable-lora", "--lora-modules", "a=/x", "b=/y", "--max-lora-rank=16")
    keys = yaml.safe_load(vllm_yaml(production_context(extra_args=given)))
    assert (keys["enable-lora"], keys["lora-modules"], keys["max-lora-rank"]) == (True, ["a=/x", "b=/y"], "16")
    for lost in (("-O3",), ("--middleware", "a", "--middleware", "b")):
        with pytest.raises(ExportRefusedError, match="export --format args"):
            vllm_yaml(production_context(extra_args=lost))
        assert _line(production_context(extra_args=lost))[-len(lost) :] == list(lost)


def test_a_flag_that_the_version_does_not_have_is_named_with_it() -> None:
    """The server would exit at once, or run without what was tuned."""
    context = production_context(watermark=0.05, extra_args=("--max-wishes", "3", "--max_wishes.b=1"))
    measured = context.recommendation.provenance.model_copy(update={"engine": "vllm", "engine_version": "0.31.0"})
    known = frozenset(flag for flag in flags_of_an_old_loader(vllm_yaml(context)) if flag.startswith("--"))

    def of(flags: frozenset[str]) -> ExportContext:
        answer = context.recommendation.model_copy(update={"provenance": measured})
        return replace(context, recommendation=answer, known_flags=flags)

    assert "--watermark" in vllm_args(of(known))
    for write in (vllm_yaml, vllm_args):
        with pytest.raises(ExportRefusedError, match=r"vLLM 0\.31\.0 has no --watermark"):
            write(of(known - {"--watermark"}))
        with pytest.raises(ExportRefusedError, match=r"vLLM 0\.31\.0 has no --max-wishes"):
            write(of(known - {"--max-wishes"}))
        with pytest.raises(ExportRefusedError, match="no --no-enable-prefix-caching"):
            write(of(known - {"--no-enable-prefix-caching"}))
        assert "enable-chunked-prefill" not in write(of(known - {"--enable-chunked-prefill"}))


def test_a_required_parameter_that_is_missing_is_an_error() -> None:
    """Its default moves with the card: the same file would serve another number of requests elsewhere."""
    with pytest.raises(ExportRefusedError, match="does not say dtype"):
        vllm_yaml(production_context(dtype=None))


def test_the_variables_that_belong_to_the_engine_go_with_it() -> None:
    """Threads bound otherwise are another machine; a value of two lines would become a variable of its own."""
    ours = production_context()
    with pytest.raises(ExportRefusedError, match=r"measured builtin.*--format vllm or args"):
        vllm_env(ours)  # an empty file would start vLLM on its defaults, and look like an answer
    on_vllm = ours.recommendation.provenance.model_copy(update={"engine": "vllm"})
    context = replace(ours, recommendation=ours.recommendation.model_copy(update={"provenance": on_vllm}))
    text = vllm_env(replace(context, environment={"VLLM_CPU_OMP_THREADS_BIND": "0-3", "A": "b c"}))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == ["A=b c", "VLLM_CPU_OMP_THREADS_BIND=0-3"]
    with pytest.raises(ExportRefusedError, match="A holds a line break"):
        vllm_env(replace(context, environment={"A": "b\nC=d"}))


def test_the_fallback_is_lower_in_what_was_tuned_and_higher_in_nothing(tmp_path: Path) -> None:
    """A fallback that asks for as much as production does is none when production is in trouble."""
    space: dict[str, Any] = {"engine": {"device_memory": None}, "budget": {"trials": 9, "time": "10h"}}
    job, origin = load_job("embedded", space), resolved_run().recommendation.provenance
    store = RunStore.create(tmp_path, job, origin)
    run_tuning(job, store, origin, FakeWorkers(), Silent())
    write_exports(store, ("vllm",), tmp_path)
    high, low = (yaml.safe_load((tmp_path / f"{name}.vllm.yaml").read_text()) for name in ("production", "protective"))
    three = ("max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization")
    assert all(low[key] <= high[key] for key in three)
    assert any(low[key] < high[key] for key in three)
    written = write_exports(store, ("args", "engine"), tmp_path / "more", profile="production")
    names = ["production.args.txt", "production.engine.yaml", "runbook.md"]
    assert [path.name for path in written] == names


def test_two_cores_are_told_as_one_number_of_requests() -> None:
    """Whoever sets a gateway's limit by the file reads what both cores hold together."""
    text = vllm_yaml(production_context(data_parallel_size=2))
    assert "# Runs at once: max_num_seqs x data_parallel_size = 40 requests" in text


def test_another_card_is_told_with_both_names() -> None:
    """Figures of one card do not hold on another; a machine without one says nothing of where the files go."""
    h200 = provenance().model_copy(update={"device": "NVIDIA H200, 140 GiB"})
    (told,) = warnings(h200, here="NVIDIA L4, 22 GiB")
    assert "NVIDIA H200, 140 GiB" in told
    assert "NVIDIA L4, 22 GiB" in told
    assert warnings(h200, here=None) == warnings(h200, here="NVIDIA H200, 140 GiB") == []
    assert warnings(provenance(), here="NVIDIA L4, 22 GiB") == []
