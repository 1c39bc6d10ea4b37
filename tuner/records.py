"""What a run consists of: the values that are measured, stored and read back.

Every figure carries its unit in its name. `None` means unknown (or not applicable) and is never a zero.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tuner.engine_config import EngineConfig
from tuner.frozen import Figure, Record


class Estimate(Record):
    """A measured figure with its 95 % interval and the number of samples behind it."""

    value: Figure
    """NaN (null in JSON) where there is no sample at all: unknown, and never better than anything."""

    low: float | None = None
    """Lower end of the interval; None where there are too few samples to give one."""

    high: float | None = None
    num_samples: int = Field(ge=0)

    @property
    def has_interval(self) -> bool:
        """Whether there were samples enough to say how sure the figure is."""
        return self.low is not None and self.high is not None


class StageKind(StrEnum):
    """Why a stage was measured."""

    LADDER = "ladder"
    """A rung of the doubling ladder."""

    BISECT = "bisect"
    """Between two rungs, where the knee may stand."""

    OVERLOAD = "overload"
    """Past the fence on purpose: what overload does to this config."""

    OPERATING = "operating"
    """A profile's operating point, re-measured."""

    DOUBLE = "double"
    """Twice the operating point's load."""

    BURST = "burst"
    """Long prompts at twice the knee's load."""

    RATE = "rate"
    """Arrivals at a rate, whatever the engine makes of them."""

    BATCH = "batch"
    """Everything at once, until it is done."""


Loop = Literal["closed", "open", "batch"]
"""Who decides when the next request is sent: users who wait for their answers, the clock, or nobody: all at once."""

EndedBy = Literal["precise", "time", "failures", "stalled", "oversaturated", "complete"]

PrefixCacheReset = Literal["done", "not reset"]

OPEN_KINDS = frozenset({StageKind.RATE, StageKind.BATCH})
"""Stages that are no point of a knee curve: their load is not a number of users."""

CLIMB_KINDS = frozenset({StageKind.LADDER, StageKind.BISECT})
"""Stages of the climb: an answer may stand on them, where the closing overload only says what lies past the fence."""


class RequestRecord(Record):
    """One request as its sender saw it. Times in seconds from the stage's first send, on one monotonic clock."""

    index: int
    intended_s: float
    """When it should have been sent; latencies count from here."""

    sent_s: float
    """When its bytes were handed to the socket."""

    first_token_s: float | None = None
    first_answer_s: float | None = None
    """The first text that is no reasoning; None where there was none."""

    finished_s: float
    token_times_s: tuple[float, ...] = ()
    """Arrival of each token. A chunk of k tokens spreads them evenly over the gap it closed."""

    longest_stall_s: float = 0.0
    """The longest gap between two chunks that brought tokens."""

    num_prompt_tokens: int
    """As the server counted, or as sent where it did not say."""

    num_output_tokens: int
    """As the server counted."""

    asked_output_tokens: int
    token_source: Literal["running_usage", "final_usage", "chunks"] = "running_usage"
    """Where token counts come from: the server's count in every chunk, its last count spread over the chunks,
    or, without any count, one token a chunk (an estimate)."""

    error: str | None = None
    """Why it failed; None for a success. A failed request has no latency."""

    rejected: bool = False
    """Refused with 503: counted apart from failures."""

    unfinished: bool = False
    """Still in flight when the stage ended: neither success nor failure."""

    warm_up: bool = False
    """Did not finish inside the measured window; kept for the record, not for the latencies."""


class MemoryFigures(Record):
    """Three different questions about memory; every field in bytes."""

    reserved_bytes: int | None = None
    """What the share takes: flat in load."""

    in_use_peak_bytes: int | None = None
    """Weights, activation peak and the most KV blocks seen in use: says whether the share is needed."""

    device_peak_bytes: int | None = None
    """What the device or the operating system charged the engine's processes with (PSS on CPU)."""


class StepFigures(Record):
    """What the engine's steps were like over a stage's window, from the engine's own counters."""

    mean_tokens: float
    """Tokens a step computed, prefill and decode together."""

    per_s: float
    """Steps a second of one engine core; 1 over it is the time from one step to the next, idle time included."""

    model_share: float | None = None
    """Share of the window that a core spent in the model, 0 to 1; the rest it was idle or the server had to do."""


class EngineFigures(Record):
    """What the engine told of itself. None is unknown, unless the engine has no such figure."""

    num_preemptions: int | None
    """Difference of the engine's counter over the measured window."""

    kv_cache_usage_peak: float | None
    """Most of the KV cache seen in use, 0 to 1, observed by scrapes."""

    not_applicable: tuple[str, ...] = ()
    """Names of fields that this engine has no way to tell, where None elsewhere means unknown."""

    def is_unknown(self, name: str) -> bool:
        """Whether a figure is missing that the engine should have told: that fails closed."""
        return getattr(self, name) is None and name not in self.not_applicable

    @property
    def has_no_preemptions(self) -> bool:
        """Whether none was counted, or the engine never preempts; not so where it is unknown."""
        return not self.num_preemptions and not self.is_unknown("num_preemptions")


class StageRecord(EngineFigures):
    """One load held until steady, then measured on one running engine."""

    index: int
    """Order within the trial."""

    kind: StageKind
    load: int | float = Field(gt=0)
    """Concurrent requests of a closed loop or a batch: whole. Requests per second of an open one."""

    loop: Loop = "closed"
    sent_rps: float | None = None
    """Requests per second that were to be sent inside the window of an open loop, where `load` is what was offered:
    random arrivals scatter around it. None: no open loop, or a record of before this was kept."""

    num_states: int | None = None
    """Independent looks at the number of requests in flight that an open loop's window is worth."""

    shown_rps: float | None = None
    """The rate that an open loop's figures speak for: the lower of offered and sent, less what too few such looks leave
    open (`tuner.measure.shown_rate`)."""

    ttft_p95_far_ms: float | None = None
    """An upper bound of the p95 at the whole of the lower rate, for limits far away (`tuner.measure.far_bound`)."""

    itl_p95_far_ms: float | None = None
    """Likewise of ITL."""

    thinks: bool = False
    """Whether its users pause between requests, so that fewer are in flight than there are users."""

    fenced: bool
    """Whether more requests wanted to run than the fence lets, so that the rest waits in the queue by our own limit."""

    workload_hash: str
    prefix_cache_reset: PrefixCacheReset | None = None
    """What came of asking the engine to forget what earlier stages left in its prefix cache; None: it was not asked, as
    no request begins like another, or nothing is cached."""

    warm_up_s: float
    """Before the measured window: the first request of every user, until no clear trend was left, and the transient."""

    transient_s: float = 0.0
    """Of the warm-up, what was cut off afterwards because throughput had not settled (MSER-5)."""

    measured_s: float
    wall_s: float
    """Warm-up and measurement together: the time load was on the engine."""

    ended_by: EndedBy
    """Which rule ended it: the interval was narrow enough, its time was up, too much failed, the engine had work and
    did none of it, requests came faster than it can serve them, or all there was to send had ended."""

    num_warm_up_requests: int
    num_completed: int
    num_failed: int
    num_rejected: int
    first_error: str | None = None

    output_throughput: Estimate
    """Generated tokens per second."""

    request_throughput_rps: float
    ttft_p50_ms: Estimate
    ttft_p95_ms: Estimate
    itl_p50_ms: Estimate
    itl_p95_ms: Estimate
    tpot_p50_ms: Estimate
    tpot_p95_ms: Estimate
    e2e_p50_ms: Estimate
    e2e_p95_ms: Estimate
    longest_stall_ms: float | None = None

    mean_prompt_tokens: Figure
    mean_output_tokens: Figure
    mean_in_flight: float
    """Time average of requests in flight, as the sender saw them."""

    littles_law_ratio: float | None = None
    """Completions per second x their mean latency / mean in flight: 1 when the figures are of one system.
    None where the window was too short, or too few requests ended in it, to judge."""

    send_slip_p95_ms: Figure
    """How late the sender was: intended to handed to the socket."""

    send_slip_p99_ms: Figure = math.nan
    """The same at p99: on record, not judged, as no verdict rests on a p99; a late send counts in its own TTFT."""

    num_left_out: int = 0
    """Requests of a trace that were not sent: failed in the original, or longer than the engine's `max_model_len`."""

    mean_held_back: float | None = None
    """Users that the sender kept from coming back in time from a pause, on average: it does not count as latency."""

    loop_lag_p95_ms: Figure
    """How late the sender's own event loop ran."""

    client_cpu_share: Figure | None = None
    """Share of one core that the load generator used. It runs in one thread and must be able to take in twice what it
    measured, so that above a half the stage is invalid. None: unknown."""

    client_events_per_s: float | None = None
    """Stream events that it took in, of all requests."""

    mean_running: float | None
    mean_waiting: float | None
    mean_waiting_deferred: float | None = None
    """Of those waiting, the ones that wait for something else than room, where the engine tells them apart."""

    peak_running: int | None
    steps: StepFigures | None = None
    """None where the engine does not count its steps."""

    process_cpu_cores: tuple[float, ...] | None = None
    """CPU use of each process of the engine while the stage was measured, in cores: first the one that was launched
    (it speaks HTTP), then its descendants, the busiest first. None for a server that is not ours."""

    other_cpu_cores: float | None = None
    """CPU that neither the engine nor the load generator used meanwhile, of the cores that this process may use; what a
    virtual machine was not given counts. None for a server that is not ours. Unit: cores."""

    idle_cpu_cores: float | None = None
    """Of the same cores, what nobody used."""

    memory: MemoryFigures
    valid: bool
    invalid_reasons: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _load_of_its_loop(self) -> Self:
        if self.loop != "open" and (not isinstance(self.load, int) or self.load < 1):
            raise ValueError(f"load={self.load} of a {self.loop} loop: it must be a whole number of at least 1")
        if (self.loop != "closed") != (self.kind in OPEN_KINDS):
            raise ValueError(f"a stage of kind {self.kind} has no {self.loop} loop")
        return self

    @property
    def users(self) -> int:
        """The load of a closed loop.

        Raises:
            ValueError: for a rate, which is no number of users.
        """
        if self.loop == "open":
            raise ValueError(f"{self.load} requests/s are no number of users")
        return int(self.load)


class FailureKind(StrEnum):
    """Why a trial has no figures. The first group says something about the config, the last two do not."""

    INVALID_CONFIG = "invalid_config"
    NO_KV_MEMORY = "no_kv_memory"
    OOM_STARTUP = "oom_startup"
    OOM_GRAPH_CAPTURE = "oom_graph_capture"
    OOM_SAMPLER_WARMUP = "oom_sampler_warmup"
    OOM_RUNTIME = "oom_runtime"
    START_TIMEOUT = "start_timeout"
    CRASHED = "crashed"
    STALLED = "stalled"
    CONFIG_MISMATCH = "config_mismatch"
    INFRASTRUCTURE = "infrastructure"
    INVALID_MEASUREMENT = "invalid_measurement"


SAYS_NOTHING = (FailureKind.INFRASTRUCTURE, FailureKind.INVALID_MEASUREMENT)
"""Failures that say nothing about the config."""


class Failed(Record):
    """A trial that gave no figures."""

    outcome: Literal["failed"] = "failed"
    kind: FailureKind
    detail: str
    """The decisive line: what the engine or the tuner said, and where to read more."""


class EngineFacts(Record):
    """What the running engine said of itself after the launch."""

    engine: str
    version: str
    device: str
    """What it computes on: `cpu`, `cuda`; `simulated:h100-8b` where nothing is computed."""

    simulated: bool = False
    """Whether its step times come from a law and not from a device."""

    num_gpu_blocks: int | None
    block_size: int | None
    max_model_len: int
    kv_block_bytes: int | None = None
    memory_total_bytes: int | None = None
    """The device the share is a share of."""

    memory_reserved_bytes: int | None = None
    weights_bytes: int | None = None
    activation_peak_bytes: int | None = None
    captures_graphs: bool | None = None
    """Whether decode steps run from graphs captured for some batch sizes; None: it does not tell."""

    @property
    def may_capture_graphs(self) -> bool:
        """Whether a fence off the sizes that graphs are captured for may be slow: not only where it is known to be."""
        return self.captures_graphs is not False


class Measured(Record):
    """A trial whose ladder was climbed."""

    outcome: Literal["measured"] = "measured"
    facts: EngineFacts
    stages: tuple[StageRecord, ...]


TrialOutcome = Annotated[Measured | Failed, Field(discriminator="outcome")]


class TrialRole(StrEnum):
    """What a launch was for."""

    STUDY = "study"
    CONFIRM_PRODUCTION = "confirm_production"
    CONFIRM_BASELINE = "confirm_baseline"
    CONFIRM_PROTECTIVE = "confirm_protective"
    SAFE_RATE = "safe_rate"
    """Production under requests that come at a rate."""


class TrialRecord(Record):
    """One engine config, one launch, one ladder."""

    number: int
    role: TrialRole
    config: EngineConfig
    origin: str
    """Where the config came from: `defaults`, `cautious_start`, `sampler`, `production`, `protective`."""

    outcome: TrialOutcome
    devices: tuple[str, ...] = ()
    """The GPUs its engine was shown, as `CUDA_VISIBLE_DEVICES` names them; none on a CPU."""

    launched: bool = True
    """False for a setting that was refused without a launch."""

    begun_s: float | None = None
    """When it began, since the job did, times between a job's end and its being gone on with left out; None in records
    of before this was kept: one trial after the other."""

    start_s: float = 0.0
    """From the launch to the first healthy answer, or to the failure."""

    measure_s: float = 0.0
    """Load on the engine: warm-up and measurement of all stages."""

    wall_s: float = 0.0
    """The whole trial, the stop included."""
