"""A job ends with an answer that its measurements carry, or says why there is none."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tests.fakes.records import estimate, resolved_run
from tests.fakes.workers import FakeWorkers, Reshape, Rule
from tuner.analysis.noise import kept_by_another
from tuner.analysis.standing import standing
from tuner.answer import Recommendation, RunVerdict
from tuner.engine_config import EngineConfig
from tuner.job import load_job
from tuner.ladder import LadderStep
from tuner.launches import Launches
from tuner.measure.stage import MeasuredStage
from tuner.planning import SAFE_RATE_STAGES, safe_rate_s
from tuner.progress import Clock
from tuner.records import Estimate, Failed, FailureKind, Measured, StageKind, StageRecord, TrialRecord, TrialRole
from tuner.store import AskedTrial, RunStore, keep_stage
from tuner.study import STUDY_NAME
from tuner.trial import TrialEvent, TrialSpec
from tuner.tuning import MAX_CHOICES, run_tuning


class Silent:
    """Watches and says nothing."""

    def trial_began(self, number: int, role: TrialRole, config: EngineConfig, origin: str, clock: Clock) -> None:
        """Nothing."""

    def stage_ended(self, number: int, stage: StageRecord, clock: Clock) -> None:
        """Nothing."""

    def trial_ended(self, trial: TrialRecord, clock: Clock) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


def _run(
    tmp_path: Path,
    *,
    fails: Rule = lambda _: None,
    reshape: Reshape = lambda made: made,
    lost: int = 0,
    simulated: bool = False,
    fills_in: int | None = None,
    over: dict[str, object] | None = None,
) -> tuple[Recommendation, RunStore, FakeWorkers]:
    job = load_job("embedded", over)
    origin = resolved_run().recommendation.provenance
    store = RunStore.create(tmp_path, job, origin)
    workers = FakeWorkers(fails=fails, reshape=reshape, lost=lost, simulated=simulated, fills_in=fills_in)
    return run_tuning(job, store, origin, workers, Silent()), store, workers


def _saturating(made: StageRecord) -> StageRecord:
    """The curve 2000 N / (5 + N), its knee near 22, latencies in proportion."""
    running = min(made.load, 128 if not made.fenced else made.load // 2)
    throughput = 2000 * running / (5 + running)
    return made.model_copy(
        update={
            "output_throughput": estimate(throughput, spread=0.02),
            "ttft_p95_ms": estimate(10.0 + made.load),
            "itl_p95_ms": estimate(4.0 + running),
            "num_preemptions": 0,
            "kv_cache_usage_peak": 0.3,
        }
    )


def test_the_defaults_are_trial_0_and_the_cautious_start_trial_1(tmp_path: Path) -> None:
    """Every gain is a gain over what the engine does by itself, measured in this very run."""
    _, store, _ = _run(tmp_path, reshape=_saturating)
    first, second = store.trials()[:2]
    assert (first.origin, first.config.max_num_seqs, first.config.max_num_batched_tokens) == ("defaults", 128, 2048)
    assert second.origin == "cautious_start"


def test_a_run_with_a_simulated_launch_is_a_simulated_run(tmp_path: Path) -> None:
    """What the engine said of itself reaches provenance and warnings, from where every export and report takes it."""
    answer, _, _ = _run(tmp_path / "real", reshape=_saturating)
    assert not answer.provenance.simulated
    assert not any("simulated" in warning for warning in answer.warnings)
    answer, _, _ = _run(tmp_path / "rehearsed", reshape=_saturating, simulated=True)
    assert answer.provenance.simulated
    assert "simulated" in answer.warnings[0]


def test_the_answer_says_what_binds_and_how_many_replicas_an_expected_load_takes(tmp_path: Path) -> None:
    """Capacity comes from single requests read back from the run, against limits of this very run."""
    over: dict[str, object] = {
        "expected": {"users": 1000},
        "price_per_device_hour": 2.0,
        "slo": {"ttft_p95": "500ms", "itl_p95": "80ms", "attainment": 0.2},
    }
    answer, _, _ = _run(tmp_path, reshape=_saturating, over=over)
    assert answer.slo is not None
    assert answer.slo.attainment == 0.2
    assert answer.production is not None
    assert answer.capacity is not None
    assert answer.capacity.attainment_target == 0.2
    assert answer.capacity.load is not None
    assert answer.capacity.replicas == math.ceil(1000 / answer.production.config.max_num_seqs)
    assert answer.capacity.cost_per_million_tokens is not None
    assert answer.diagnosis is not None
    assert answer.knee is not None
    assert answer.knee.binding == answer.diagnosis.binding
    assert len(answer.diagnosis.advice) == 6
    assert {each.symptom for each in answer.diagnosis.symptoms} >= {"dies_later", "latency_up", "mix_changed"}


def test_production_stands_left_of_the_knee_and_is_confirmed_beside_the_defaults(tmp_path: Path) -> None:
    """The reported figures are those of launches made after the choice, in turn with the defaults."""
    answer, store, _ = _run(tmp_path, reshape=_saturating)
    assert answer.verdict is RunVerdict.RESOLVED
    assert answer.knee is not None
    assert answer.knee.load is not None
    assert answer.production is not None
    assert answer.production.config.max_num_seqs == answer.production.operating_point.load < answer.knee.load
    origins = [
        trial.origin for trial in store.trials() if trial.role is not TrialRole.STUDY and trial.origin != "rival"
    ]
    there = ["production", "defaults"]
    assert origins[:4] == [*there, *reversed(there)]
    assert answer.baseline is not None
    assert answer.baseline.throughput_gain is not None
    assert math.isclose(answer.baseline.throughput_gain.value, 1.0, abs_tol=0.01)


@pytest.mark.parametrize("ahead", [1.0, 1.5])
def test_a_close_call_is_decided_by_launches_in_turn(tmp_path: Path, ahead: float) -> None:
    """The smaller of two settings within noise is taken only if the larger does not turn out faster after all."""
    running: list[TrialSpec] = []

    def remember(spec: TrialSpec) -> None:
        running.append(spec)

    def faster_again(made: StageRecord) -> StageRecord:
        made = _saturating(made)
        larger = running[-1].config.max_num_batched_tokens >= 512
        factor = {"rival": ahead, "production": 1.0}.get(running[-1].origin, 1.05 if larger else 1.0)
        return made.model_copy(update={"output_throughput": estimate(factor * made.output_throughput.value)})

    answer, store, workers = _run(tmp_path, reshape=faster_again, fails=remember)
    rivals = [spec.config for spec in workers.launched if spec.origin == "rival"]
    assert answer.verdict is RunVerdict.RESOLVED
    assert answer.production is not None
    assert answer.baseline is not None
    origins = [trial.origin for trial in store.trials() if trial.role is not TrialRole.STUDY]
    assert origins[:6] == ["production", "rival", "defaults", "defaults", "rival", "production"]
    assert (answer.production.config == rivals[0]) is (ahead > 1)
    assert answer.production.operating_point.load == answer.production.config.max_num_seqs
    assert answer.baseline.operating_point is not None
    assert answer.baseline.operating_point.load == answer.production.operating_point.load
    if ahead > 1:
        assert answer.baseline.throughput_gain is not None
        assert answer.baseline.throughput_gain.value > 1.1


def test_a_faster_rival_that_breaks_the_limits_takes_no_place_from_a_choice_that_held(tmp_path: Path) -> None:
    """Launches that held are the answer: thrown away for a rival that cannot be deployed, the night has none."""
    running: list[TrialSpec] = []

    def remember(spec: TrialSpec) -> None:
        running.append(spec)

    def over_the_limit(made: StageRecord) -> StageRecord:
        made, is_rival = _saturating(made), running[-1].origin == "rival"
        larger = running[-1].config.max_num_batched_tokens >= 512
        factor = {"rival": 1.4, "production": 1.0}.get(running[-1].origin, 1.05 if larger else 1.0)
        changed = {"output_throughput": estimate(factor * made.output_throughput.value)}
        return made.model_copy(update=changed | ({"itl_p95_ms": estimate(900.0)} if is_rival else {}))

    answer, store, _ = _run(tmp_path, reshape=over_the_limit, fails=remember)
    launched = [trial for trial in store.trials() if trial.role is TrialRole.CONFIRM_PRODUCTION]
    assert [trial.origin for trial in launched] == ["production", "rival", "rival", "production"]
    assert answer.verdict is RunVerdict.RESOLVED
    assert answer.production is not None
    assert answer.production.config == launched[0].config


def test_protective_is_below_production_and_was_tried_with_the_burst(tmp_path: Path) -> None:
    """The fallback is never a guess: lower somewhere, higher nowhere, hit at twice the knee's load."""
    answer, store, _ = _run(tmp_path, reshape=_saturating)
    assert answer.production is not None
    assert answer.protective is not None
    assert answer.knee is not None
    high, low = answer.production.config, answer.protective.config
    assert low.max_num_seqs <= high.max_num_seqs
    assert low.max_num_batched_tokens <= high.max_num_batched_tokens
    assert low.gpu_memory_utilization <= high.gpu_memory_utilization
    assert (
        low.max_num_seqs <= 0.8 * high.max_num_seqs or low.max_num_batched_tokens <= 0.8 * high.max_num_batched_tokens
    )
    assert answer.protective.burst is not None
    assert answer.protective.burst.load == math.ceil(2 * (answer.knee.load or 0))
    assert TrialRole.CONFIRM_PROTECTIVE in {trial.role for trial in store.trials()}


def test_a_selection_never_reports_the_figure_it_was_won_with(tmp_path: Path) -> None:
    """A lucky stage is re-measured: what it really gives is what the user reads."""

    def lucky(made: StageRecord) -> StageRecord:
        made = _saturating(made)
        again = made.kind in (StageKind.OPERATING, StageKind.DOUBLE)
        return made.model_copy(update={"output_throughput": estimate(500.0)}) if again else made

    answer, _, _ = _run(tmp_path, reshape=lucky)
    assert answer.production is not None
    assert answer.production.operating_point.output_throughput.value == 500.0


def test_a_production_that_its_own_launches_refute_is_never_deployed(tmp_path: Path) -> None:
    """Preemptions and stalls that only the re-measurement saw cost the verdict, not the night."""

    def worse_again(made: StageRecord) -> StageRecord:
        made = _saturating(made)
        bad = {"itl_p95_ms": estimate(900.0), "num_preemptions": 40}
        return made.model_copy(update=bad) if made.kind is StageKind.OPERATING else made

    answer, store, _ = _run(tmp_path, reshape=worse_again)
    assert answer.verdict is RunVerdict.NO_FEASIBLE_CONFIG
    assert answer.production is None
    assert answer.knee is None
    assert "refuted" in answer.reason
    assert "900 of 80 ms" in answer.reason
    launched = [trial for trial in store.trials() if trial.role is TrialRole.CONFIRM_PRODUCTION]
    confirmed = [str(trial.config) for trial in launched if trial.origin == "production"]
    assert len(set(confirmed)) == MAX_CHOICES
    rivals = {str(trial.config) for trial in launched if trial.origin == "rival"}
    assert not rivals & set(confirmed)  # what fell as a rival is not tried again as the next choice


def test_a_choice_just_inside_a_limit_gives_way_to_one_with_room(tmp_path: Path) -> None:
    """Whoever gives a tight limit would else get no answer: the luckiest stage inside it is not so lucky again."""

    def slower_again(made: StageRecord) -> StageRecord:
        made = _saturating(made)
        again = made.kind in (StageKind.OPERATING, StageKind.DOUBLE)
        return made.model_copy(update={"itl_p95_ms": estimate(1.15 * made.itl_p95_ms.value)}) if again else made

    limits = {"slo": {"ttft_p95": "1s", "itl_p95": "20ms"}}
    answer, store, _ = _run(tmp_path, reshape=slower_again, over=limits)
    assert answer.verdict is RunVerdict.RESOLVED
    assert answer.production is not None
    assert 0 < answer.production.operating_point.itl_p95_ms.value <= 20.0
    launched = [trial for trial in store.trials() if trial.role is TrialRole.CONFIRM_PRODUCTION]
    refuted, *confirmed = [trial.config.max_num_seqs for trial in launched]
    assert len(confirmed) == 2  # what one launch has refuted is not launched again
    assert set(confirmed) == {answer.production.config.max_num_seqs}
    assert refuted > confirmed[0]
    assert any("refuted when re-measured" in warning for warning in answer.warnings)


def test_a_refuted_choice_gives_way_to_the_next_best(tmp_path: Path) -> None:
    """One lucky trial does not cost the user the answer."""
    refuted: list[EngineConfig] = []

    def fails(spec: TrialSpec) -> Failed | None:
        if spec.role is not TrialRole.CONFIRM_PRODUCTION:
            return None
        if not refuted:
            refuted.append(spec.config)
        crashed = Failed(kind=FailureKind.OOM_RUNTIME, detail="out of memory under load")
        return crashed if spec.config == refuted[0] else None

    answer, _, _ = _run(tmp_path, reshape=_saturating, fails=fails)
    assert answer.verdict is RunVerdict.RESOLVED
    assert answer.production is not None
    assert answer.production.config != refuted[0]
    assert any("out of memory under load" in warning for warning in answer.warnings)


def test_a_protective_that_dies_under_the_burst_is_said_to_have_died(tmp_path: Path) -> None:
    """The reason on record is the engine's, not that it never started."""

    def fails(spec: TrialSpec) -> Failed | None:
        died = Failed(kind=FailureKind.CRASHED, detail="exit code -9 under the burst")
        return died if spec.role is TrialRole.CONFIRM_PROTECTIVE else None

    answer, _, _ = _run(tmp_path, reshape=_saturating, fails=fails)
    assert answer.verdict is RunVerdict.RESOLVED
    assert answer.protective is None
    assert any("exit code -9 under the burst" in warning for warning in answer.warnings)
    assert any("no protective profile" in warning for warning in answer.warnings)


def test_a_failure_outside_the_config_does_not_rule_the_config_out(tmp_path: Path) -> None:
    """A port clash teaches the sampler nothing about the setting it hit."""

    def fails(spec: TrialSpec) -> Failed | None:
        clash = Failed(kind=FailureKind.INFRASTRUCTURE, detail="port held by another server")
        return clash if spec.number in (2, 3, 4) else None

    _, store, _ = _run(tmp_path, reshape=_saturating, fails=fails)
    trials = store.trials()
    assert trials[2].config == trials[3].config == trials[4].config
    assert (
        len([trial for trial in trials if trial.role is TrialRole.STUDY and trial.outcome.outcome == "measured"]) == 8
    )


def test_limits_nobody_meets_name_the_trial_that_comes_closest_and_export_no_production(tmp_path: Path) -> None:
    """An SLO out of reach is said with the least violating trial; nothing is deployed by mistake."""
    answer, _, _ = _run(tmp_path, reshape=_saturating, over={"slo": {"ttft_p95": "1ms", "itl_p95": "1ms"}})
    assert answer.verdict is RunVerdict.SLO_INFEASIBLE
    assert answer.production is None
    assert answer.least_violating_trial is not None
    assert f"trial {answer.least_violating_trial}" in answer.reason
    assert answer.protective is not None


def test_every_trial_failing_is_an_answer_too(tmp_path: Path) -> None:
    """A model that never starts ends in `no_feasible_config` with the kinds of failure, not in a traceback."""
    answer, store, workers = _run(
        tmp_path, fails=lambda _: Failed(kind=FailureKind.OOM_STARTUP, detail="24 of 22 GiB free")
    )
    assert answer.verdict is RunVerdict.NO_FEASIBLE_CONFIG
    assert "oom_startup" in answer.reason
    assert (answer.production, answer.protective, answer.slo is None) == (None, None, False)
    launched = [trial for trial in store.trials() if trial.launched]
    assert len(workers.launched) == len(launched) == 9


def test_one_failing_setting_does_not_stop_the_study(tmp_path: Path) -> None:
    """A crash is a row with its reason, and the search goes on."""

    def fails(spec: TrialSpec) -> Failed | None:
        crashed = Failed(kind=FailureKind.CRASHED, detail="exit code 7")
        return crashed if spec.role is TrialRole.STUDY and spec.number in (0, 3) else None

    answer, store, _ = _run(tmp_path, reshape=_saturating, fails=fails)
    assert answer.verdict is RunVerdict.RESOLVED
    assert answer.num_failed == 2
    failed = [trial.number for trial in store.trials() if trial.outcome.outcome == "failed"]
    assert failed == [0, 3]


def test_a_lost_worker_says_nothing_about_the_setting(tmp_path: Path) -> None:
    """The defaults are tried again after the machinery failed, twice at the most."""
    answer, store, _ = _run(tmp_path, reshape=_saturating, lost=2)
    first = store.trials()[:3]
    assert [trial.config for trial in first] == [first[0].config] * 3
    kinds = [trial.outcome.kind for trial in first if trial.outcome.outcome == "failed"]
    assert kinds == [FailureKind.INFRASTRUCTURE] * 2
    assert answer.verdict is RunVerdict.RESOLVED


def test_without_limits_they_are_derived_from_the_unloaded_defaults_and_marked(tmp_path: Path) -> None:
    """A user who names no SLO gets one that is said to be derived."""
    answer, store, _ = _run(tmp_path, reshape=_saturating, over={"slo": None})
    assert answer.slo is not None
    assert answer.slo.derived
    assert (store.path / "slo.json").is_file()


def test_every_trial_is_on_disk_with_numbers_without_holes(tmp_path: Path) -> None:
    """What was launched can be read back, one directory a launch."""
    answer, store, workers = _run(tmp_path, reshape=_saturating)
    trials = store.trials()
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert answer.num_trials == len(trials) >= len(workers.launched)
    assert {"trials.parquet", "stages.parquet", "recommendation.json", "job.yaml"} <= {
        file.name for file in store.path.iterdir()
    }


def test_settings_without_room_for_one_request_are_not_launched(tmp_path: Path) -> None:
    """What the first launch taught about memory spares the hopeless launches; they are recorded as refused."""
    space: dict[str, object] = {
        "parameters": {"gpu_memory_utilization": {"choices": [0.01, 0.92], "unit": "share", "why": "to the floor"}}
    }
    over = {"search_space": _space(space), "budget": {"trials": 14}}
    _, store, workers = _run(tmp_path, reshape=_saturating, over=over)
    refused = [trial for trial in store.trials() if not trial.launched]
    assert refused
    assert all(trial.config.gpu_memory_utilization == 0.01 for trial in refused)
    assert all(spec.config.gpu_memory_utilization > 0.01 for spec in workers.launched)
    assert all(
        "refused before launch" in trial.outcome.detail for trial in refused if trial.outcome.outcome == "failed"
    )


def _shares(*choices: float) -> dict[str, object]:
    space: dict[str, object] = {
        "parameters": {
            "gpu_memory_utilization": {"choices": list(choices), "unit": "share", "why": "near the edge"},
            "max_num_seqs": {"choices": [32, 64, 128, 1024], "unit": "requests", "why": "up to vLLM's own"},
            "max_num_batched_tokens": {"choices": [1024, 2048], "unit": "tokens", "why": "two are enough"},
        }
    }
    return {"search_space": _space(space), "budget": {"trials": 14}}


def _fails_with(kind: FailureKind, *, share: float, seqs: int = 1) -> Rule:
    def fails(spec: TrialSpec) -> Failed | None:
        config = spec.config
        is_hit = config.gpu_memory_utilization >= share and config.max_num_seqs >= seqs
        return Failed(kind=kind, detail="out of memory") if is_hit else None

    return fails


def test_a_share_that_fails_at_graph_capture_is_launched_once_and_production_keeps_below(tmp_path: Path) -> None:
    """0.97 passes and 0.98 does not: one launch is lost to it, and 0.95 is what production gets, confirmed as such."""
    fails = _fails_with(FailureKind.OOM_GRAPH_CAPTURE, share=0.98)
    over = _shares(0.97, 0.98, 0.99)
    answer, store, workers = _run(tmp_path, reshape=_saturating, fails=fails, over=over)

    failed = [spec for spec in workers.launched if spec.config.gpu_memory_utilization >= 0.98]
    assert [spec.config.gpu_memory_utilization for spec in failed] in ([0.98], [0.99, 0.98])
    refused = [trial for trial in store.trials() if not trial.launched]
    assert refused
    for trial in refused:
        assert isinstance(trial.outcome, Failed)
        assert trial.outcome.kind is FailureKind.OOM_GRAPH_CAPTURE
        assert "refused before launch: trial" in trial.outcome.detail
    assert answer.production is not None
    assert answer.production.config.gpu_memory_utilization == 0.95
    assert any("0.97 lowered to 0.95" in sentence for sentence in answer.production.evidence)
    confirmed = [trial.config for trial in store.trials() if trial.origin == "production"]
    assert {config.gpu_memory_utilization for config in confirmed} == {0.95}


def test_sequences_that_fail_at_the_samplers_warm_up_are_not_tried_at_that_share_again(tmp_path: Path) -> None:
    """1024 sequences at 0.95 fail: later proposals of as many at as high a share are skipped, and none raises it."""
    fails = _fails_with(FailureKind.OOM_SAMPLER_WARMUP, share=0.95, seqs=1024)
    _, store, workers = _run(tmp_path, reshape=_saturating, fails=fails, over=_shares(0.9, 0.95, 0.96))

    hit = [spec.number for spec in workers.launched if fails(spec) is not None]
    assert hit
    assert len([spec for spec in workers.launched if fails(spec) and spec.number >= hit[0]]) <= 2
    first = next(spec for spec in workers.launched if spec.number == hit[0])
    later = [spec for spec in workers.launched if spec.number > hit[0] and spec.role is TrialRole.STUDY]
    assert all(spec.config.gpu_memory_utilization <= first.config.gpu_memory_utilization for spec in later)
    assert any(not trial.launched for trial in store.trials())


def test_defaults_that_ran_out_of_memory_are_not_launched_beside_production(tmp_path: Path) -> None:
    """The comparison is given up and said, not paid for with launches that must fail again."""
    fails = _fails_with(FailureKind.OOM_GRAPH_CAPTURE, share=0.92)
    answer, store, workers = _run(tmp_path, reshape=_saturating, fails=fails, over=_shares(0.5, 0.6))

    assert answer.production is not None
    assert [spec.number for spec in workers.launched if fails(spec) is not None] == [0]
    roles = [trial.role for trial in store.trials() if trial.role is not TrialRole.STUDY]
    assert roles[:2] == [TrialRole.CONFIRM_PRODUCTION] * 2
    assert any("the engine's defaults failed in trial 0: oom_graph_capture" in warning for warning in answer.warnings)


def _space(over: dict[str, object]) -> dict[str, object]:
    from tuner.space import load_space

    space = load_space("cpu").model_dump(mode="json")
    changes = over["parameters"]
    assert isinstance(changes, dict)
    space["parameters"] |= changes
    return space


class _Killed(BaseException):
    """The process that tunes dies here."""


class _Scattered(FakeWorkers):
    """Launches differ, as real ones do: some are slower throughout, and some crash that had nothing wrong."""

    def __init__(self) -> None:
        super().__init__(reshape=_saturating, fails=_dies_or_crashes)

    def _made(self, spec: TrialSpec, step: LadderStep, *, index: int) -> StageRecord:
        made, slower = super()._made(spec, step, index=index), _luck(spec)
        if step.kind is StageKind.RATE:
            return made
        slower *= 1.2 if spec.role is TrialRole.CONFIRM_PRODUCTION else 1.0
        throughput = estimate(made.output_throughput.value / (0.9 + 0.1 * slower), spread=0.02)
        latency = estimate(made.itl_p95_ms.value * slower)
        return made.model_copy(update={"output_throughput": throughput, "itl_p95_ms": latency})


def _luck(spec: TrialSpec) -> float:
    return float(np.random.default_rng(spec.number).uniform(0.85, 1.15))


class _Mortal(_Scattered):
    """Dies with the process that tunes, before its n-th event is handed over."""

    def __init__(self, *, at_event: int) -> None:
        super().__init__()
        self._events_left = at_event

    def run(self, spec: TrialSpec) -> Iterator[TrialEvent]:
        """The trial's events, as far as they come."""
        for event in super().run(spec):
            if self._events_left == 0:
                raise _Killed
            self._events_left -= 1
            yield event


def _dies_or_crashes(spec: TrialSpec) -> Failed | None:
    """The largest share runs out of memory; every fifth launch crashes, and may be tried again."""
    if spec.config.gpu_memory_utilization == 0.9:
        return Failed(kind=FailureKind.OOM_RUNTIME, detail="out of memory under load")
    return Failed(kind=FailureKind.CRASHED, detail="signal 11") if spec.number % 5 == 4 else None


def _asked_for(trials: Sequence[TrialRecord]) -> list[tuple[TrialRole, EngineConfig, str]]:
    return [(trial.role, trial.config, trial.origin) for trial in trials]


@given(deaths=st.lists(st.integers(0, 40), min_size=1, max_size=6))
@settings(max_examples=12)
def test_a_run_killed_anywhere_goes_on_to_the_same_answer(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[int]
) -> None:
    """Killed again and again, a run measures what it would have measured, nothing twice, with numbers without holes."""
    over: dict[str, object] = {
        "budget": {"trials": 6, "time": "10h"},
        "slo": {"ttft_p95": "1s", "itl_p95": "24ms"},
    }
    job = load_job("embedded", over)
    origin = resolved_run().recommendation.provenance
    whole_store = RunStore.create(tmp_path_factory.mktemp("whole"), job, origin)
    whole = run_tuning(job, whole_store, origin, _Scattered(), Silent())
    store = RunStore.create(tmp_path_factory.mktemp("killed"), job, origin)
    measured: list[tuple[int, int]] = []
    for at_event in deaths:
        workers = _Mortal(at_event=at_event)
        with contextlib.suppress(_Killed):
            run_tuning(job, RunStore.open(store.path), origin, workers, Silent())
        measured += workers.stages_made
    last = _Scattered()
    answer = run_tuning(job, RunStore.open(store.path), origin, last, Silent())
    measured += last.stages_made

    assert _asked_for(store.trials()) == _asked_for(whole_store.trials())
    assert [trial.outcome for trial in store.trials()] == [trial.outcome for trial in whole_store.trials()]
    assert [trial.number for trial in store.trials()] == list(range(len(store.trials())))
    assert answer.verdict == whole.verdict
    assert answer.production == whole.production
    assert len(set(measured)) == len(measured)
    assert _states(store.path / "study.journal") <= {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}


def _states(journal: Path) -> set[TrialState]:
    storage = JournalStorage(JournalFileBackend(str(journal)))
    return {trial.state for trial in optuna.load_study(study_name=STUDY_NAME, storage=storage).trials}


def test_a_space_of_which_half_dies_costs_few_launches_and_none_twice(tmp_path: Path) -> None:
    """Settings that run out of memory are learned from: the budget goes to those that live, failures are listed."""

    def dies(spec: TrialSpec) -> Failed | None:
        too_much = spec.config.gpu_memory_utilization >= 0.75
        return Failed(kind=FailureKind.OOM_RUNTIME, detail="out of memory under load") if too_much else None

    over: dict[str, object] = {"budget": {"trials": 12, "time": "10h"}}
    _, store, workers = _run(tmp_path, reshape=_saturating, fails=dies, over=over)
    launched = [spec.config for spec in workers.launched if spec.role is TrialRole.STUDY]
    dead = [config for config in launched if config.gpu_memory_utilization >= 0.75]
    assert len(dead) <= 0.4 * len(launched)
    assert len(set(map(str, launched))) == len(launched)
    assert standing(store.trials(), None).failures == {FailureKind.OOM_RUNTIME: len(dead)}


def test_what_no_setting_changes_is_not_tried_with_all_of_them(tmp_path: Path) -> None:
    """A model that cannot be loaded costs three launches and one clear line, not the whole budget."""
    missing = Failed(kind=FailureKind.INVALID_CONFIG, detail="model='x/y': the hub did not give it")
    answer, _, workers = _run(tmp_path, fails=lambda _: missing)
    assert len(workers.launched) == 3
    assert answer.verdict is RunVerdict.NO_FEASIBLE_CONFIG
    assert "the hub did not give it" in answer.reason


def test_a_start_gets_no_more_than_is_left_of_the_budget_but_never_less_than_those_before(tmp_path: Path) -> None:
    """One that hangs must not outlast the job; one that is like the others must not fail for coming last."""
    _, _, workers = _run(tmp_path, reshape=_saturating, over={"budget": {"trials": 3, "time": "10m"}})
    limits = [spec.most_start_s for spec in workers.launched]
    assert all(limit is not None and 500 < limit <= 600 for limit in limits)
    _, _, workers = _run(tmp_path / "short", reshape=_saturating, over={"budget": {"trials": 3, "time": "1s"}})
    assert {spec.most_start_s for spec in workers.launched} == {60.0}


def test_a_start_that_hung_gives_the_next_one_no_more_time(tmp_path: Path) -> None:
    """Each hang would else allow the next three times as long, with the budget long over."""

    class _Hangs(FakeWorkers):
        def run(self, spec: TrialSpec) -> Iterator[TrialEvent]:
            *_, trial = super().run(spec)
            assert isinstance(trial, TrialRecord)
            yield trial.model_copy(update={"start_s": spec.most_start_s})

    job = load_job("embedded", {"budget": {"trials": 3, "time": "10m"}})
    origin = resolved_run().recommendation.provenance
    hung = Failed(kind=FailureKind.START_TIMEOUT, detail="not ready")
    workers = _Hangs(fails=lambda _: hung)
    run_tuning(job, RunStore.create(tmp_path, job, origin), origin, workers, Silent())
    assert len(workers.launched) > 1
    assert all(spec.most_start_s is not None and spec.most_start_s <= 600 for spec in workers.launched)


class _Clocks(Silent):
    """Keeps what was said of the time left, by the role of what had begun last."""

    def __init__(self) -> None:
        self.left_s: dict[TrialRole, list[float]] = {}
        self._role = TrialRole.STUDY

    def trial_began(self, number: int, role: TrialRole, config: EngineConfig, origin: str, clock: Clock) -> None:
        """Note the role."""
        del number, config, origin, clock
        self._role = role

    def stage_ended(self, number: int, stage: StageRecord, clock: Clock) -> None:
        """Note the time."""
        del number, stage
        if clock.left_s is not None:
            self.left_s.setdefault(self._role, []).append(clock.left_s)


def test_the_time_left_knows_that_the_safe_rate_takes_longer_than_a_launch(tmp_path: Path) -> None:
    """Who is told of ten seconds, and waits a minute, believes no figure of the tool any more."""
    job = load_job("embedded", {"budget": {"time": "10h"}})
    origin = resolved_run().recommendation.provenance
    clocks = _Clocks()
    run_tuning(job, RunStore.create(tmp_path, job, origin), origin, FakeWorkers(reshape=_saturating), clocks)
    rate_s = safe_rate_s(job, start_s=1.0)
    assert rate_s > 20
    for role in (TrialRole.STUDY, TrialRole.CONFIRM_PRODUCTION):
        assert min(clocks.left_s[role]) >= rate_s
    assert clocks.left_s[TrialRole.SAFE_RATE][0] >= 0.8 * rate_s


def test_time_spent_before_a_run_was_cut_off_counts(tmp_path: Path) -> None:
    """The answer's wall time holds what was measured in it, also the stages of a trial that goes on."""
    job = load_job("embedded")
    store = RunStore.create(tmp_path, job, resolved_run().recommendation.provenance)
    ended = resolved_run().trials[0]
    store.write_trial(ended)
    assert ended.outcome.outcome == "measured"
    stage = ended.outcome.stages[0]
    asked = AskedTrial(number=1, role=TrialRole.STUDY, config=ended.config, origin="sampler")
    keep_stage(store.begin_trial(asked), MeasuredStage(record=stage, requests=(), samples=()))
    elapsed_s = Launches(job, store, FakeWorkers(), Silent()).elapsed_s()
    assert elapsed_s >= ended.wall_s + stage.wall_s > ended.wall_s


def test_a_finished_run_gone_on_with_says_the_same(tmp_path: Path) -> None:
    """The verdict is about the search: launches that came after it are no ladders, whenever it is decided again."""

    def straight(made: StageRecord) -> StageRecord:
        return _saturating(made).model_copy(update={"output_throughput": estimate(100.0 * made.load, spread=0.02)})

    over: dict[str, object] = {"budget": {"trials": 5, "time": "10h"}}
    first, store, _ = _run(tmp_path, reshape=straight, over=over)
    assert any(trial.role is not TrialRole.STUDY for trial in store.trials())
    again = run_tuning(store.job(), store, store.provenance(), FakeWorkers(reshape=straight), Silent())
    assert (again.verdict, again.reason) == (first.verdict, first.reason)
    assert again.protective == first.protective


@pytest.mark.parametrize("fills_in", [0, 3, 8, 9])
def test_nothing_is_launched_on_a_device_that_stays_full_and_a_resumed_run_looks_again(
    tmp_path: Path, fills_in: int
) -> None:
    """No figure is taken beside what an earlier launch left: the run says which device, and goes on when it is free.

    The search takes 9 launches, so that it is at its start, in its midst, at its end, or among those that confirm.
    """
    answer, store, workers = _run(tmp_path, reshape=_saturating, fills_in=fills_in)
    assert len(workers.launched) == fills_in + 1
    assert store.trials()[fills_in].outcome.outcome == "measured"
    assert any("GPU-a" in warning for warning in answer.warnings)
    assert answer.protective is None
    refused = [trial.role for trial in store.trials() if not trial.launched]
    confirming = [TrialRole.CONFIRM_BASELINE, TrialRole.CONFIRM_BASELINE, TrialRole.CONFIRM_PRODUCTION]
    assert refused == (confirming if fills_in == 9 else [])
    if fills_in < 9:
        assert answer.verdict is not RunVerdict.RESOLVED

    again = FakeWorkers(reshape=_saturating)
    answer = run_tuning(store.job(), RunStore.open(store.path), store.provenance(), again, Silent())
    assert answer.verdict is RunVerdict.RESOLVED
    assert answer.production is not None
    assert answer.protective is not None
    assert not any("GPU-a" in warning for warning in answer.warnings)
    studied = [trial for trial in store.trials() if trial.role is TrialRole.STUDY]
    assert len(studied) == len({trial.config for trial in studied}) == store.job().budget.trials == 9


def test_a_failure_on_a_device_that_stays_full_is_not_retried_there(tmp_path: Path) -> None:
    """The retry would meet what made it necessary."""
    clash = Failed(kind=FailureKind.INFRASTRUCTURE, detail="a neighbour took the memory")
    answer, _, workers = _run(tmp_path, reshape=_saturating, fails=lambda _: clash, fills_in=0)
    assert len(workers.launched) == 1
    assert answer.verdict is RunVerdict.NO_FEASIBLE_CONFIG


def test_a_comparison_that_met_other_work_says_so(tmp_path: Path) -> None:
    """Four launches cannot tell a gain from a neighbour who came and went in the middle."""

    def beside_others(made: StageRecord) -> StageRecord:
        seen = {"other_cpu_cores": 0.9 if made.kind is StageKind.OPERATING else 0.02, "idle_cpu_cores": 0.1}
        return _saturating(made).model_copy(update=seen)

    answer, _, _ = _run(tmp_path, reshape=beside_others)
    (warning,) = [text for text in answer.warnings if "other work took" in text]
    assert answer.production is not None
    for number in answer.production.confirmed_by:
        assert str(number) in warning


def test_launches_too_far_apart_to_promise_a_rate_are_warned_of(tmp_path: Path) -> None:
    """Whoever holds arrivals to half of what was seen must know that it is the launches, and what to do about it."""

    class _Wild(FakeWorkers):
        def _made(self, spec: TrialSpec, step: LadderStep, *, index: int) -> StageRecord:
            made = super()._made(spec, step, index=index)
            factor = 0.6 if spec.number % 2 else 1.2
            seen = estimate(factor * made.output_throughput.value, spread=0.02)
            return made if step.kind is StageKind.RATE else made.model_copy(update={"output_throughput": seen})

    job = load_job("embedded")
    origin = resolved_run().recommendation.provenance
    workers = _Wild(reshape=_saturating)
    answer = run_tuning(job, RunStore.create(tmp_path / "wild", job, origin), origin, workers, Silent())
    assert answer.safe_rate_rps is not None
    assert answer.safe_rate_rps.low is not None
    assert 0 < answer.safe_rate_rps.low < 0.5 * answer.safe_rate_rps.value
    assert any("see what else runs on the machine" in warning for warning in answer.warnings)
    calm, _, _ = _run(tmp_path / "calm", reshape=_saturating)
    assert not any("see what else runs on the machine" in warning for warning in calm.warnings)


def test_production_is_tried_with_arrivals_at_a_rate(tmp_path: Path) -> None:
    """Who puts production behind an open door knows which rate it holds, and that the closed loop's is too much."""
    answer, store, _ = _run(tmp_path, reshape=_saturating)
    assert answer.production is not None
    safe = answer.safe_rate_rps
    assert safe is not None
    assert safe.high is not None
    assert answer.launch_noise is not None
    assert safe.low == pytest.approx(safe.value * kept_by_another(answer.launch_noise))
    (trial,) = [trial for trial in store.trials() if trial.role is TrialRole.SAFE_RATE]
    assert trial.config == answer.production.config
    assert isinstance(trial.outcome, Measured)
    assert {stage.kind for stage in trial.outcome.stages} == {StageKind.RATE}
    assert len(trial.outcome.stages) <= SAFE_RATE_STAGES
    assert safe.value in {stage.load for stage in trial.outcome.stages}
    tokens = next(stage for stage in trial.outcome.stages if stage.load == safe.value).mean_output_tokens
    assert safe.value < answer.production.operating_point.output_throughput.value / tokens


def test_a_job_without_time_for_it_says_that_no_safe_rate_was_measured(tmp_path: Path) -> None:
    """The budget is kept, and nobody takes the closed loop's rate for a safe one."""
    answer, store, _ = _run(tmp_path, reshape=_saturating, over={"budget": {"time": "30s"}})
    assert answer.production is not None
    assert answer.safe_rate_rps is None
    assert any("no safe rate was measured" in warning for warning in answer.warnings)
    assert not [trial for trial in store.trials() if trial.role is TrialRole.SAFE_RATE]


def test_a_chat_has_no_safe_rate_in_requests(tmp_path: Path) -> None:
    """An arrival is then a conversation: a rate of those read as requests would be turns times too low or too high."""
    over: dict[str, object] = {"workload": "chat-turns", "engine": {"fixed": {"max_model_len": 32768}}}
    answer, store, _ = _run(tmp_path, reshape=_saturating, over=over)
    assert answer.production is not None
    assert answer.safe_rate_rps is None
    assert not [trial for trial in store.trials() if trial.role is TrialRole.SAFE_RATE]


def test_what_is_on_disk_is_in_the_answer_however_little_time_is_left(tmp_path: Path) -> None:
    """Gone on with when its time is up, a run keeps both launches of production, its safe rate and its fallback."""
    answer, store, _ = _run(tmp_path, reshape=_saturating)
    job = store.job()
    late = job.model_copy(update={"budget": job.budget.model_copy(update={"time": 1.0})})
    workers = FakeWorkers(reshape=_saturating)
    again = run_tuning(late, RunStore.open(store.path), answer.provenance, workers, Silent())
    assert not workers.launched
    assert again.production == answer.production
    assert again.baseline == answer.baseline
    assert again.safe_rate_rps == answer.safe_rate_rps is not None
    assert again.protective == answer.protective


def test_a_device_that_somebody_else_holds_ends_the_search_soon(tmp_path: Path) -> None:
    """Each try waits half a minute for memory: a dozen of them tell no more than the first few."""
    held = Failed(kind=FailureKind.INFRASTRUCTURE, detail="0 bytes are free now: stop pid 17633")
    answer, _, workers = _run(tmp_path, reshape=_saturating, fails=lambda _: held)
    assert len({spec.config for spec in workers.launched}) == 2
    assert answer.verdict is RunVerdict.NO_FEASIBLE_CONFIG
    assert "stop pid 17633" in answer.reason


@pytest.mark.parametrize(
    "worse", [estimate(900.0), estimate(30.0, num_samples=20), Estimate(value=math.nan, num_samples=0)]
)
def test_a_launch_outside_the_limits_is_not_averaged_away(tmp_path: Path, worse: Estimate) -> None:
    """Two launches of 30 and 900 ms have a mean inside 500 ms; a night begins with one launch."""
    launched: list[TrialSpec] = []

    def remember(spec: TrialSpec) -> None:
        launched.append(spec)

    def worse_the_second_time(made: StageRecord) -> StageRecord:
        made = _saturating(made)
        spec = launched[-1]
        before = sum(each.config == spec.config and each.role is spec.role for each in launched)
        if made.kind is not StageKind.OPERATING or spec.role is not TrialRole.CONFIRM_PRODUCTION or before < 2:
            return made
        return made.model_copy(update={"ttft_p95_ms": worse})

    answer, _, _ = _run(tmp_path, reshape=worse_the_second_time, fails=remember)
    assert answer.production is None
    assert "refuted when re-measured" in answer.reason
