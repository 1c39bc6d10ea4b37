"""What a run answers: verdicts, the knee, both profiles and their evidence, as `recommendation.json` holds it."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from tuner.engine_config import EngineConfig
from tuner.frozen import Record
from tuner.records import EngineFigures, Estimate

SCHEMA_VERSION = 1
"""Raised by one whenever a stored field changes its meaning or leaves."""


class LadderVerdict(StrEnum):
    """What a ladder says about its knee."""

    KNEE = "knee"
    FENCED = "fenced"
    NOT_REACHED = "not_reached"
    ALREADY_SATURATED = "already_saturated"
    TOO_FEW_STAGES = "too_few_stages"


class RunVerdict(StrEnum):
    """What a run says about its question."""

    RESOLVED = "resolved"
    NOT_REACHED = "not_reached"
    ALREADY_SATURATED = "already_saturated"
    TOO_FEW_STAGES = "too_few_stages"
    SLO_INFEASIBLE = "slo_infeasible"
    NO_FEASIBLE_CONFIG = "no_feasible_config"


class Slo(Record):
    """Limits a setting must meet at its operating point."""

    ttft_p95_ms: float = Field(gt=0)
    itl_p95_ms: float = Field(gt=0)
    derived: bool = False
    """Whether the limits came from the unloaded engine because none were given."""

    attainment: float = Field(default=0.9, gt=0, lt=1)
    """Share of requests that must be inside both limits by their own TTFT and TPOT where capacity is stated."""


class Expected(Record):
    """The load a deployment has to hold: one of the two."""

    users: int | None = Field(default=None, ge=1)
    """Requests in flight at once."""

    rate_rps: float | None = Field(default=None, gt=0)
    """Requests per second."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Expected:
        if (self.users is None) == (self.rate_rps is None):
            raise ValueError("expected: give either users or rate_rps, not both and not neither")
        return self


class CrossChecks(Record):
    """What other knee rules say; shown, never deciding. Loads, or None where a rule gives no answer."""

    asymptote_crossing: float | None = None
    usl: float | None = None
    kneedle: float | None = None
    ten_percent_per_doubling: float | None = None


Binding = Literal["fence", "token_budget", "kv_blocks", "compute", "memory_bandwidth", "server_cpu", "client"]
"""What holds a throughput curve back: two limits we set, four resources, or the load generator."""


class KneeFinding(Record):
    """The answer to one ladder."""

    verdict: LadderVerdict
    load: float | None = None
    """The knee; None unless the verdict is `knee`."""

    interval: tuple[float, float] | None = None
    """Where the knee may stand, given the stages' noise."""

    cautious_load: float | None = None
    """The load of greatest Kleinrock power (r = 1)."""

    binding: Binding | None = None
    """What saturates there; None where the stages do not tell."""

    signals: tuple[str, ...] = ()
    """What was seen around the bend, in words: preemptions, dips, collapse, tail onset."""

    dips: tuple[float, ...] = ()
    cross_checks: CrossChecks = CrossChecks()
    warnings: tuple[str, ...] = ()


class Advice(Record):
    """Whether moving one parameter helps where the curve bends."""

    parameter: str
    change: str
    """Which way: `raised`, `lowered`, `fp8`, `doubled`."""

    effect: Literal["can_help", "cannot_help", "would_hurt", "unknown"]
    why: str
    """One sentence with the figure it rests on."""


class Symptom(Record):
    """Something seen in operation, what it means on this engine, and what to do first."""

    symptom: Literal["fails_at_start", "dies_later", "latency_up", "mix_changed"]
    seen: str
    means: str
    first: str


class Diagnosis(Record):
    """Why the knee is where it is, which parameter can still help, and what later symptoms would mean."""

    binding: Binding | None
    evidence: tuple[str, ...] = ()
    """Sentences that led there, each with its figures; also what kept the answer open."""

    advice: tuple[Advice, ...] = ()
    symptoms: tuple[Symptom, ...] = ()


class OperatingPoint(EngineFigures):
    """A measured stage a setting is meant to run at."""

    load: int
    output_throughput: Estimate
    ttft_p95_ms: Estimate
    itl_p95_ms: Estimate
    peak_memory_bytes: int | None
    """Peak in use under load: weights, activation peak, peak used KV blocks."""

    reserved_memory_bytes: int | None


class ParetoPoint(Record):
    """One (config, stage) that no other beats beyond noise."""

    trial: int
    stage: int
    config: EngineConfig
    load: int
    output_throughput: float
    output_throughput_per_device: float | None = None
    """What the front compares: the throughput divided by the devices the config takes."""

    ttft_p95_ms: float
    itl_p95_ms: float
    peak_memory_bytes: int | None = None
    """Peak in use under load: what the point needs, where the share only says what it takes."""

    reserved_memory_bytes: int | None = None


class BurstEvidence(EngineFigures):
    """What a burst of long prompts at twice the knee's load did to the protective profile."""

    load: int
    num_completed: int
    num_failed: int
    num_rejected: int
    ttft_p95_ms: Estimate
    itl_p95_ms: Estimate
    goodput_rps: float
    """Requests per second that each met the SLO by their own TTFT and TPOT."""

    passed: bool
    reasons: tuple[str, ...] = ()
    """Why it did not pass. A p95 TTFT over its limit is said here too, and does not fail: without valves it queues."""


class Profile(Record):
    """A named, deployable engine config with its evidence."""

    name: Literal["production", "protective"]
    config: EngineConfig
    operating_point: OperatingPoint
    trial: int
    """The study trial it was chosen from."""

    confirmed_by: tuple[int, ...] = ()
    """Trials of its own that re-measured it; their figures are the reported ones."""

    evidence: tuple[str, ...] = ()
    """Sentences that say why, each with its figures."""

    cuts: tuple[str, ...] = ()
    """For the protective profile: each parameter below production and the failure it answers."""

    burst: BurstEvidence | None = None


class LaunchNoise(Record):
    """How much throughput differs between launches of one and the same schedule, told from this run's own launches."""

    relative_sd: float = Field(ge=0)
    """Standard deviation as a share of the figure, beyond what a stage's own interval shows."""

    num_launches: int
    degrees_of_freedom: int


class Capacity(Record):
    """How much one replica of production holds, and how many replicas an expected load takes."""

    attainment_target: float
    """Share of requests inside the SLO that was asked for."""

    load: int | None
    """Most concurrent requests under production's fence that were shown to have that share inside, by the lower end of
    its interval; None: at no stage."""

    load_share: Estimate | None
    """The share there, with Wilson's interval."""

    open_load: int | None = None
    """Most concurrent requests above `load` that may have it: too few ended there to say."""

    rate_rps: float | None = None
    """Highest open-loop rate that was shown to have that share inside; None where no rate was measured, or at none."""

    rate_share: Estimate | None = None
    open_rate_rps: float | None = None
    """Highest rate above `rate_rps` that may have it."""

    replicas: int | None = None
    """For the expected load; None where none was given, or no figure tells."""

    reason: str | None = None
    """How the replicas were counted, in one sentence."""

    cost_per_million_tokens: float | None = None
    """In the currency of the price: output tokens, at the expected rate where one was given, else at full load."""


class Baseline(Record):
    """The engine's own defaults, and what production is worth beside them."""

    trial: int
    config: EngineConfig
    operating_point: OperatingPoint | None
    confirmed_by: tuple[int, ...] = ()
    throughput_gain: Estimate | None = None
    """Production over the defaults at production's load, re-measured in turn; 1.0 is no gain."""


class TimeSplit(Record):
    """Where the study's wall time went. Seconds."""

    wall_s: float
    start_s: float
    measure_s: float
    overhead_s: float
    """What was neither an engine start nor load under measurement; waits count here."""


class Provenance(Record):
    """What a reader needs to judge whether the answer still holds."""

    kneetune_version: str
    engine: str
    engine_version: str | None
    model: str
    model_hash: str
    workload: str
    workload_hash: str
    device: str
    hardware: str
    python: str
    packages: dict[str, str]
    seed: int
    created: str
    simulated: bool = False
    """Whether step times came from a law and not from a device: nothing in the run was measured on hardware."""


class SafeRateFigure(Estimate):
    """A rate shown to be safe, and the stage that shows it: random arrivals scatter around the rate that is offered."""

    offered_rps: float | None = None
    sent_rps: float | None = None
    """Requests per second that were really sent; None in answers of before this was kept."""


class Recommendation(Record):
    """The answer of a run: `recommendation.json`; its schema is published as `docs/recommendation.schema.json`."""

    schema_version: int = SCHEMA_VERSION
    verdict: RunVerdict
    reason: str
    """The verdict in one sentence, with its figures."""

    slo: Slo | None
    knee: KneeFinding | None
    """Production's config with the fence lifted; None where the verdict is not `resolved`."""

    knee_trial: int | None = None
    """The trial whose ladder shows it."""

    diagnosis: Diagnosis | None = None

    production: Profile | None
    protective: Profile | None
    baseline: Baseline | None
    pareto: tuple[ParetoPoint, ...] = ()
    launch_noise: LaunchNoise | None = None
    """None where too few launches shared a schedule: intervals of several launches are then their envelope."""

    safe_rate_rps: SafeRateFigure | None = None
    """The highest rate of Poisson arrivals that production was shown to hold inside the SLO. Its lower end is what
    another launch holds too, as launches here differ; its upper end the lowest rate tried that it was not shown to
    hold, None where it held all."""

    capacity: Capacity | None = None
    least_violating_trial: int | None = None
    """Where no setting meets the SLO: the one that comes closest."""

    num_trials: int
    num_failed: int
    time: TimeSplit
    provenance: Provenance
    warnings: tuple[str, ...] = ()
