"""A job may search and fix any parameter of the engine, under conditions, and nothing that breaks one is launched."""

from __future__ import annotations

import re
import tempfile
from importlib import resources
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.fakes.records import resolved_run
from tests.fakes.workers import FakeWorkers
from tests.tuner.test_tuning import Silent
from tuner.__main__ import app
from tuner.engine_config import EngineConfig
from tuner.extra_args import flags
from tuner.inputs import InputError
from tuner.job import FixedParameters, TuningJob, load_job
from tuner.parameters import SEARCHABLE
from tuner.placement import Placement
from tuner.planning import cautious_values, default_values, plan_of
from tuner.records import TrialRole
from tuner.space import MOST_COMBINATIONS, SamplerName, combinations, load_space
from tuner.store import RunStore
from tuner.study import Objectives, Study
from tuner.tuning import run_tuning
from tuner.wording import config_text

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

TRUTHS = st.permutations([True, False])
OPTIONAL = {
    "max_model_len": st.sets(st.integers(900, 9000), min_size=1, max_size=2).map(sorted),
    "enable_chunked_prefill": TRUTHS,
    "enable_prefix_caching": TRUTHS,
    "dtype": st.permutations(["auto", "bfloat16"]),
    "kv_cache_dtype": st.permutations(["auto", "fp8"]),
    "long_prefill_token_threshold": st.sets(st.integers(0, 4096), min_size=1, max_size=2).map(sorted),
    "max_num_active_seqs": st.sets(st.integers(1, 64), min_size=1, max_size=2).map(sorted),
    "max_num_scheduled_tokens": st.sets(st.integers(1, 1024), min_size=1, max_size=2).map(sorted),
    "watermark": st.sets(st.floats(0, 0.99), min_size=1, max_size=2).map(sorted),
    "scheduler_reserve_full_isl": TRUTHS,
    "max_num_queued_reqs": st.sets(st.integers(1, 4096), min_size=1, max_size=2).map(sorted),
    "max_num_queued_tokens": st.sets(st.integers(1, 1 << 20), min_size=1, max_size=2).map(sorted),
    "block_size": st.sets(st.sampled_from([16, 32, 128]), min_size=1, max_size=2).map(sorted),
    "num_gpu_blocks_override": st.sets(st.integers(1, 4096), min_size=1, max_size=2).map(sorted),
    "kv_cache_memory_bytes": st.sets(st.integers(1, 1 << 40), min_size=1, max_size=2).map(sorted),
    "quantization": st.permutations(["fp8", "awq"]),
    "speculative_config": st.permutations(['{"method": "ngram"}', '{"method": "mtp"}']),
    "enforce_eager": TRUTHS,
    "tensor_parallel_size": st.sets(st.integers(1, 8), min_size=1, max_size=2).map(sorted),
    "pipeline_parallel_size": st.sets(st.integers(1, 8), min_size=1, max_size=2).map(sorted),
    "data_parallel_size": st.sets(st.integers(1, 8), min_size=1, max_size=2).map(sorted),
}
OVERRIDES = {"num_gpu_blocks_override", "kv_cache_memory_bytes"}
QUICK_SAMPLERS = [name for name in get_args(SamplerName) if name != "gp"]
CONDITIONS = ["max_num_batched_tokens >= 4 * max_num_seqs", "max_num_seqs < 64 or gpu_memory_utilization < 0.9"]

ONE_CPU = Placement(parallel_trials=1, num_gpus=0)


def _space(
    *conditions: str,
    start: dict[str, object] | None = None,
    **choices: list[bool] | list[int] | list[float] | list[str],
) -> dict[str, object]:
    """A small space of the three, with these choices beside or instead of theirs."""
    three = {"max_num_seqs": [16, 64], "max_num_batched_tokens": [128, 1024], "gpu_memory_utilization": [0.5, 0.9]}
    space: dict[str, object] = load_space("cpu").model_dump(mode="json", exclude_none=True)
    space["parameters"] = {name: {"choices": given, "why": "x"} for name, given in (three | choices).items()}
    space["conditions"] = list(conditions)
    space["cautious_start"] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.5}
    space["cautious_start"] |= start or {}
    return space


def _unlimited(space: dict[str, object], **over: object) -> TuningJob:
    """A job with nothing fixed."""
    return load_job("default", {"model": "embedded", "search_space": space, **over})


def _if_any_works(space: dict[str, object]) -> TuningJob | None:
    try:
        return _unlimited(space)
    except InputError as error:
        if "no setting of" not in str(error):
            raise
        return None


@given(
    data=st.data(),
    names=st.sets(st.sampled_from(sorted(OPTIONAL)), max_size=3),
    sampler=st.sampled_from(QUICK_SAMPLERS),
)
@settings(max_examples=15)
def test_every_proposal_of_any_space_is_a_valid_setting_that_breaks_nothing(
    data: st.DataObject, names: set[str], sampler: SamplerName
) -> None:
    """Whatever is searched, the study proposes configs the engine accepts, each once, and the job survives its file."""
    choices = {name: data.draw(OPTIONAL[name], label=name) for name in sorted(names)}
    if names & OVERRIDES:
        choices["gpu_memory_utilization"] = [0.9]
    conditions = data.draw(st.lists(st.sampled_from(CONDITIONS), unique=True))
    job = _if_any_works(_space(*conditions, **choices))
    if job is None:
        return
    assert TuningJob.model_validate(job.model_dump(mode="json")) == job
    possible = [values for values in combinations(job.search_space) if job.impossible(values) is None]
    with tempfile.TemporaryDirectory() as folder:
        study = Study(job.search_space, Path(folder) / "journal", seed=1, sampler=sampler, impossible=job.impossible)
        seen = []
        while len(seen) < 6 and (proposal := study.ask()) is not None:
            seen.append(proposal.values)
            study.tell_measured(proposal, Objectives(1.0 + len(seen), 10.0, 5.0), {"itl": -0.1})
    assert len(seen) == len(set(seen)) == min(6, len(possible))
    assert set(seen) <= set(possible)
    for values in seen:
        config = job.config(values)
        for name in job.search_space.searched:
            assert getattr(config, name) in job.search_space.choices(name)


@pytest.mark.parametrize("sampler", get_args(SamplerName))
def test_every_sampler_reaches_both_values_of_what_has_no_order(tmp_path: Path, sampler: SamplerName) -> None:
    """A switch is tried on and off, by a sampler of sequences too."""
    job = _unlimited(_space(enable_prefix_caching=[True, False], watermark=[0.0, 0.01, 0.05]))
    study = Study(job.search_space, tmp_path / "journal", seed=0, sampler=sampler, impossible=job.impossible)
    tried = set()
    for _ in range(30 if sampler in QUICK_SAMPLERS else 8):
        proposal = study.ask()
        assert proposal is not None
        tried.add(proposal.values.enable_prefix_caching)
        study.tell_measured(proposal, Objectives(1.0, 10.0, 5.0), {"itl": -0.1})
    assert tried == {True, False}


def test_a_study_of_switches_cut_off_goes_on(tmp_path: Path) -> None:
    """A setting that was open is given again with its switch, and what is impossible stays unproposed."""
    job = _unlimited(_space(CONDITIONS[0], enable_prefix_caching=[True, False]))

    def opened() -> Study:
        return Study(job.search_space, tmp_path / "journal", seed=0, impossible=job.impossible)

    first = opened().ask()
    again = opened()
    left = again.ask()
    assert first is not None
    assert left is not None
    assert left.values == first.values
    assert left.values.enable_prefix_caching is not None
    rest = [proposal.values for proposal in iter(again.ask, None)]
    assert len({left.values, *rest}) == 3 * 2 * 2


def test_what_breaks_a_condition_is_planned_as_impossible_and_never_launched(tmp_path: Path) -> None:
    """The user's own rule costs no launch, is named with its values, and leaves the defaults alone as the baseline."""
    condition = "max_num_batched_tokens >= 32 * max_num_seqs or enable_prefix_caching"
    job = _unlimited(_space(condition, enable_prefix_caching=[False, True]), budget={"trials": 40, "time": "10h"})
    impossible = plan_of(job, ONE_CPU).impossible
    assert len(impossible) == 3 * 2
    assert f"the condition {condition!r} does not hold at enable_prefix_caching=False" in impossible[0]

    origin = resolved_run().recommendation.provenance
    workers = FakeWorkers()
    store = RunStore.create(tmp_path, job, origin)
    run_tuning(job, store, origin, workers, Silent())
    launched = [spec.config for spec in workers.launched if spec.role is TrialRole.STUDY]
    assert launched[0] == job.config(default_values(job))
    for config in launched[1:]:
        assert config.max_num_batched_tokens >= 32 * config.max_num_seqs or config.enable_prefix_caching
    assert {config.enable_prefix_caching for config in launched[1:]} == {True, False}
    refused = [trial for trial in store.trials() if not trial.launched]
    assert [trial.origin for trial in refused] == ["cautious_start"]  # 256 tokens for 16 requests, the switch off
    assert store.job() == job


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (_space(enable_prefix_caching=[True, True]), "choices must not repeat"),
        (_space(dtype=["auto", "auto"]), "choices must not repeat"),
        (_space(watermark=[0.1, 0.01]), "choices must rise"),
        (_space(watermark=[0.1, 1.0]), "watermark=1.0: it should be less than 1"),
        (_space(watermark=[False, True]), "watermark=False: it should be a valid number"),
        (_space(enable_prefix_caching=[0, 1]), "enable_prefix_caching=0: it should be a valid boolean"),
        (_space(dtype=[16]), "dtype=16: it should be a valid string"),
        (_space(max_num_active_seqs=[0, 4]), "greater than or equal to 1"),
        (_space(max_num_seqs=[16, "32"]), "all numbers, or all texts"),  # type: ignore[list-item]
        (_space(watermark=[None]), "a choice is a number, a text, true or false"),  # type: ignore[list-item]
        (_space(watermrak=[0.1]), "did you mean 'watermark'"),
        (_space("max_num_seqs >= "), "conditions.0: 'max_num_seqs >= ' cannot be read"),
        (_space("max_seqs > 3"), "'max_seqs > 3': max_seqs is no parameter here"),
        (_space("__import__('os').system('true')"), "not part of the language"),
        (_space("watermark > 0.1"), "'watermark > 0.1' looks at watermark, which is neither searched nor fixed"),
        (_space("dtype > 3"), "the condition 'dtype > 3' cannot be evaluated at dtype=auto"),
        (
            _space("max_num_seqs > 64"),
            "no setting of 8 can work: change choices; of the first, the condition 'max_num_seqs > 64'",
        ),
        (_space(max_num_active_seqs=[128]), "max_num_active_seqs=128 is above max_num_seqs"),
        (_space(start={"watermark": 0.1}), "cautious_start.watermark: it is not among the searched"),
        (_space(watermark=[0.1], start={"watermark": 2.0}), "cautious_start.watermark: must be less than 1 (got 2.0)"),
        (_space(max_model_len=[100, 2048]), "max_model_len=100"),
        (_space(watermark=[n / 1e5 for n in range(1 + MOST_COMBINATIONS // 8)]), "100,008 combinations are too many"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_when_it_is_read(space: dict[str, object], told: str) -> None:
    """A slip costs a sentence that names it, not a night of failed launches."""
    with pytest.raises(InputError) as caught:
        _unlimited(space)
    assert told in str(caught.value)


def test_a_condition_that_is_no_text_is_refused() -> None:
    """YAML reads `- true` as a truth."""
    space = _space() | {"conditions": [True]}
    with pytest.raises(InputError, match="a condition is a text such as"):
        _unlimited(space)


def test_searched_and_fixed_at_once_is_refused_by_name() -> None:
    """Two values for one parameter would leave one of them unheeded."""
    space = _space(enable_prefix_caching=[True, False])
    for value in (True, False):
        with pytest.raises(InputError, match="enable_prefix_caching is both searched and fixed"):
            _unlimited(space, engine={"fixed": {"enable_prefix_caching": value}})


def test_conditions_see_what_is_fixed() -> None:
    """A rule may speak of a parameter that keeps one value."""
    space = _space("max_num_batched_tokens > 200 or watermark >= 0.02")
    fixed = {"fixed": {"watermark": 0.01, "max_num_scheduled_tokens": "100"}}
    job = _unlimited(space, engine=fixed)
    assert len(plan_of(job, ONE_CPU).impossible) == 2 * 2
    assert all("max_num_batched_tokens=128, watermark=0.01" in reason for reason in plan_of(job, ONE_CPU).impossible)
    assert job.config(default_values(job)).max_num_scheduled_tokens == 100


def test_the_defaults_set_nothing_and_the_cautious_start_sets_everything_searched() -> None:
    """Trial 0 is the engine as it comes; trial 1 takes the start's own value, else the first choice."""
    space = _space(watermark=[0.01, 0.05], enable_prefix_caching=[True, False], start={"watermark": 0.05})
    job = _unlimited(space)
    assert default_values(job).watermark is None
    start = cautious_values(job)
    assert (start.watermark, start.enable_prefix_caching) == (0.05, True)
    assert job.config(start).watermark == 0.05


def test_every_searchable_parameter_can_be_fixed_beside_the_three() -> None:
    """What can be searched can also be held still."""
    assert set(SEARCHABLE[3:]) == set(FixedParameters.model_fields) - {"extra_args"} == set(OPTIONAL)
    assert set(SEARCHABLE) | {"extra_args"} == set(EngineConfig.model_fields)


def test_lengths_are_read_with_their_suffixes_wherever_a_job_names_them() -> None:
    """16k is 16,000 and 16K is 16,384: taken for each other, a length of 16,000 would not fit a budget of 16,384."""

    def read(length: str, *budgets: str) -> TuningJob:
        space = _space(max_num_batched_tokens=list(budgets))
        return _unlimited(space, engine={"fixed": {"max_model_len": length, "enable_chunked_prefill": False}})

    job = read("16k", "16K", "25.6k")
    assert job.search_space.choices("max_num_batched_tokens") == (16_384, 25_600)
    assert plan_of(job, ONE_CPU).impossible == ()
    with pytest.raises(InputError, match=r"max_num_batched_tokens=16000 is below max_model_len=16384"):
        read("16K", "16k")
    for faulty in ("25.6K", "16 K"):
        with pytest.raises(InputError, match=f"max_num_batched_tokens={faulty}: '{faulty}' is not a number of tokens"):
            read("16k", faulty)


@pytest.mark.parametrize("name", sorted(OVERRIDES))
def test_a_share_that_decides_nothing_is_not_searched(name: str) -> None:
    """Launches that differ in an idle parameter alone are spent for nothing, and their noise would be tuned to."""
    with pytest.raises(InputError, match=f"{name} says how large the KV cache is, whatever gpu_memory_utilization is"):
        _unlimited(_space(), engine={"fixed": {name: 2**20}})
    job = _unlimited(_space(gpu_memory_utilization=[0.9]), engine={"fixed": {name: 2**20}})
    assert getattr(job.config(default_values(job)), name) == 2**20


def test_two_cores_run_twice_the_fence_and_take_twice_the_devices() -> None:
    """With one core's fence a ladder would call the second core's half a queue."""
    three = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.9}
    config = EngineConfig.model_validate(three | {"data_parallel_size": 2, "tensor_parallel_size": 4})
    assert (config.fence, config.num_devices) == (32, 8)
    assert config.parallel_sizes == "tensor_parallel_size=4 x data_parallel_size=2"
    assert config.fenced(9).max_num_seqs == 5
    assert config.model_copy(update={"max_num_active_seqs": 4}).fence == 8


@pytest.mark.parametrize(
    ("num_cores", "fence", "product"), [(2, 128, "max_num_seqs x data_parallel_size"), (1, 64, "max_num_seqs")]
)
def test_a_load_above_what_all_cores_run_is_told_with_the_product(num_cores: int, fence: int, product: str) -> None:
    """Two cores of 64 hold 128 users, not 64: the warning names what the rest waits for."""
    over: dict[str, object] = {"engine": {"fixed": {"data_parallel_size": num_cores}}}
    (told,) = plan_of(_unlimited(_space(), expected={"users": fence + 1}, **over), ONE_CPU).warnings
    assert f"{fence + 1} users are expected" in told
    assert f" {product} = {fence} requests" in told
    assert plan_of(_unlimited(_space(), expected={"users": fence}, **over), ONE_CPU).warnings == ()


def test_speculative_decoding_is_one_text_however_it_was_written() -> None:
    """Keys and values, or their JSON: the same setting is not launched twice, and what is no object is refused."""

    def fixed(value: object) -> FixedParameters:
        return FixedParameters.model_validate({"speculative_config": value})

    given = {"method": "ngram", "num_speculative_tokens": 3}
    assert fixed(given) == fixed('{"num_speculative_tokens": 3, "method": "ngram"}')
    for wrong in ("ngram", "[3]", 3):
        with pytest.raises(ValueError, match="JSON"):
            fixed(wrong)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-num-seqs", "5"], "--max-num-seqs is a parameter: write max_num_seqs"),
        (["--no-enable_prefix_caching"], "write enable_prefix_caching"),
        (["--max-num-se=5"], "write max_num_seqs"),
        (["-tp", "2"], "write tensor_parallel_size"),
        (["--port", "1"], "set by the launch itself"),
        (["--api-key", "k"], "brings a secret"),
        (["16"], "comes first and is no flag"),
    ],
)
def test_a_further_argument_that_says_what_is_said_elsewhere_is_refused(arguments: list[str], told: str) -> None:
    """The engine would take the last of two values, and the record would name the other."""
    with pytest.raises(InputError, match=re.escape(told)):
        _unlimited(_space(), engine={"fixed": {"extra_args": arguments}})


def test_further_arguments_reach_the_launch_as_they_are() -> None:
    """What we have no name for can still be measured, and is on the record."""
    arguments = ["--enable-lora", "--max-lora-rank", "-1", "--compilation-config={}"]
    job = _unlimited(_space(), engine={"fixed": {"extra_args": arguments}})
    config = job.config(default_values(job))
    assert flags(config.extra_args) == [
        ("--enable-lora", []),
        ("--max-lora-rank", ["-1"]),
        ("--compilation-config", ["{}"]),
    ]
    assert "extra_args=--enable-lora --max-lora-rank -1" in config_text(config)


def test_the_example_of_the_preset_can_be_searched() -> None:
    """What the comment in the preset shows works as it stands."""
    text = (resources.files("search_spaces") / "spaces" / "cpu.yaml").read_text(encoding="utf-8")
    example = yaml.safe_load("".join(line[4:] for line in text.splitlines(keepends=True) if line.startswith("#   ")))
    space = yaml.safe_load(text)
    space["parameters"] |= example["parameters"]
    planned = plan_of(_unlimited(space | {"conditions": example["conditions"]}), ONE_CPU)
    assert len(planned.conditions) == 2
    assert 0 < len(planned.impossible) < planned.num_combinations == 7 * 5 * 5 * 2 * 3


def test_the_plan_shows_every_searched_parameter_and_condition(tmp_path: Path) -> None:
    """The user sees before anything starts what is searched and what is ruled out."""
    space = _space(CONDITIONS[0], enable_prefix_caching=[True, False], dtype=["auto", "float16"])
    file = tmp_path / "job.yaml"
    file.write_text(
        yaml.safe_dump({"model": "embedded", "workload": "chat-short", "burst": "long-prompts", "search_space": space})
    )
    told = CliRunner().invoke(app, ["plan", str(file)])
    assert told.exit_code == 0, told.output
    assert "  enable_prefix_caching: true, false\n" in told.output
    assert "  dtype: auto, float16\n" in told.output
    assert f"  condition: {CONDITIONS[0]}\n" in told.output
    assert "32 combinations, 8 of them impossible" in told.output


def test_a_trial_answers_only_for_settings_that_are_its_own_in_all_else(tmp_path: Path) -> None:
    """Below a fence that was measured the rest must be equal: caching off is launched, though caching on is known."""
    start: dict[str, object] = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "gpu_memory_utilization": 0.9}
    space = _space(enable_prefix_caching=[True, False], start=start)
    job = _unlimited(space, sampler="grid", budget={"trials": 40, "time": "10h"})
    origin = resolved_run().recommendation.provenance
    workers = FakeWorkers()
    run_tuning(job, RunStore.create(tmp_path, job, origin), origin, workers, Silent())
    launched = [spec.config for spec in workers.launched if spec.role is TrialRole.STUDY]
    known = job.config(cautious_values(job)).model_copy(update={"max_num_seqs": 16})
    assert known not in launched
    assert known.model_copy(update={"enable_prefix_caching": False}) in launched


def test_a_config_of_an_older_run_is_read_with_what_the_engine_did_then() -> None:
    """A run that was kept stays readable; what it could not set was the engine's own."""
    old = '{"max_num_seqs": 8, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.9, "dtype": "auto"}'
    config = EngineConfig.model_validate_json(old)
    assert (config.watermark, config.max_num_active_seqs, config.kv_cache_dtype) == (None, None, "auto")
    assert config.fence == 8


def test_a_fallback_that_breaks_a_condition_is_not_launched_and_production_that_does_says_so(tmp_path: Path) -> None:
    """Profiles are derived from what was measured: the rules hold for them too, or the answer says they do not."""
    condition = "max_num_seqs % 16 == 0 and (max_num_batched_tokens >= 200 or watermark > 1)"
    job = _unlimited(_space(condition, watermark=[0.0, 0.01]), budget={"trials": 12, "time": "10h"})
    origin = resolved_run().recommendation.provenance
    workers = FakeWorkers()
    answer = run_tuning(job, RunStore.create(tmp_path, job, origin), origin, workers, Silent())
    tried = [spec.config for spec in workers.launched if spec.role is TrialRole.CONFIRM_PROTECTIVE]
    assert all(job.broken_by(config) is None for config in tried)
    assert answer.production is not None
    assert answer.production.config.max_num_seqs % 16
    assert any("production's fence" in warning and condition in warning for warning in answer.warnings)
