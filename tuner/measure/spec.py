"""What to measure, and on which running engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from tuner.answer import Slo
from tuner.load.arrivals import AllAtOnce, Replayed
from tuner.load.connection import Endpoint
from tuner.load.workload import Workload
from tuner.measure.memory import EngineMemory
from tuner.measure.prometheus import VLLM_METRICS, MetricNames
from tuner.records import StageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """What to measure, and how long it may take: at most `max_warm_up_s + max_s` and a moment to close."""

    index: int
    kind: StageKind
    load: int | float
    """Users of a closed loop, requests per second of an open one, requests of a batch."""

    max_num_seqs: int
    """The fence in force."""

    workload: Workload
    entropy: tuple[int, ...]
    """(study seed, trial, stage, repeat): no two stages of a study send one prompt twice."""

    min_requests: int = 60
    """Requests to finish in the window before precision may end it; 59 are the fewest that give a p95 an interval."""

    min_s: float = 2.0
    max_s: float = 30.0
    """Longest measured window."""

    max_warm_up_s: float = 30.0
    target_relative_half_width: float = 0.05
    """Precise: at a look, the half width of the throughput's 95 % interval is at most this share of it. The reported
    interval is wider (`steady.EARLY_STOP_WIDENING`): who stops at the first narrow one has picked it."""

    limits: Slo | None = None
    """What the stage may be judged by: while a p95's interval holds its limit, more samples are what the answer lacks,
    and users are let go on, however precise their throughput. It also tells which lateness of the sender's own cannot
    matter."""

    stall_s: float = 60.0
    """No token for so long while requests are in flight, and by its own counters the engine did nothing: stalled."""

    @property
    def has_an_end(self) -> bool:
        """Whether what is to be sent is finite, a batch or a trace: all of it is the window, from the first send on."""
        return isinstance(self.workload.arrivals, AllAtOnce | Replayed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A running engine."""

    endpoint: Endpoint
    model: str
    """The name it serves the model under."""

    max_model_len: int
    token_ids: range = range(256)
    """Token ids to make prompts of: most tokenizers have bytes or other ordinary tokens there."""

    root_pid: int | None = None
    """The engine's first process; None where it is not ours to look at."""

    memory: EngineMemory = field(default_factory=EngineMemory)
    metrics: MetricNames = VLLM_METRICS
    """What its page calls what is read from there."""

    not_applicable: frozenset[str] = frozenset()
    """Figures of a `StageRecord` that this engine has no way to tell."""
