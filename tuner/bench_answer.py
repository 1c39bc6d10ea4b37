"""What the ladder of a running server answers, as `bench.json` holds it."""

from __future__ import annotations

from typing import Literal

from tuner.analysis.diagnosis import climbed
from tuner.analysis.knee import FEWEST_STAGES
from tuner.analysis.no_safe_rate import open_rates
from tuner.analysis.outage import outage
from tuner.analysis.slo import over_within_the_fence
from tuner.answer import SCHEMA_VERSION, KneeFinding, OperatingPoint, SafeRateFigure, Slo
from tuner.elsewhere.stage import Axis
from tuner.engine_config import EngineConfig
from tuner.frozen import Record
from tuner.ladder_answer import AnswerVerdict, LadderAnswer
from tuner.load.workload import Workload
from tuner.measure.validity import CLIENT_BOUND, OTHERS
from tuner.records import StageKind, StageRecord

UNKNOWN_ENGINE = "unknown"


class ServerFacts(Record):
    """What a running server told; None: it did not."""

    url: str
    model: str
    engine: str
    """`builtin`, `vllm`, or whatever the server says owns the model; `unknown` where it says nothing."""

    version: str | None = None
    device: str | None = None
    simulated: bool = False
    max_model_len: int | None = None
    config: EngineConfig | None = None
    """Of one core, where the whole of it is told."""

    fence: int | None = None
    """Most requests that run at once, all cores together."""

    has_metrics: bool
    """Whether it has a page that says what runs, what waits, how full the KV cache is and how often it preempted."""

    num_in_flight: int | None = None
    """Requests it had before any of ours."""


class BenchAnswer(LadderAnswer):
    """The answer to the ladder of a running server, with all it rests on."""

    schema_version: int = SCHEMA_VERSION
    finding: KneeFinding
    """What the ladder says, also where that is no knee."""

    because: tuple[str, ...] = ()
    """Why the server was not measured on, where it went away; why what binds is known, or is not: a sentence each."""

    slo: Slo | None
    """As given, or derived; None: neither given nor a valid stage at load 1 to derive it from."""

    operating_point: OperatingPoint | None
    """The stage of most throughput left of the knee and inside the SLO."""

    safe_rate_rps: SafeRateFigure | None = None
    """The highest rate of arrivals shown to stay inside the SLO, as `Recommendation.safe_rate_rps`."""

    axis: Axis = Axis.CONCURRENCY
    """What the finding's loads are."""

    fence: int | None
    fence_source: Literal["told", "given", "recognised"] | None
    """Whether the server told its fence, the user gave it, or running and waiting requests showed it."""

    server: ServerFacts
    workload: Workload
    workload_hash: str
    seed: int
    prefix_cache: str
    """`reset`, or `not reset:` and why."""

    interrupted: bool = False
    """Whether it was stopped before the ladder was climbed."""

    asked: tuple[float, ...] = ()
    """The loads or rates that were named; none: a ladder was climbed."""

    command: str = ""
    """The command line, without any key."""

    stages: tuple[StageRecord, ...]
    """Those past a recognised fence are marked."""

    wall_s: float
    created: str
    kneetune_version: str


def headline(answer: BenchAnswer) -> str:
    """The verdict in one sentence."""
    finding, text = answer.finding, answer.axis.text
    is_open = answer.axis is Axis.REQUEST_RATE
    loads = [stage.load for stage in answer.stages if not stage.fenced and (stage.loop == "open") is is_open]
    match answer.verdict:
        case AnswerVerdict.RESOLVED:
            between = "" if finding.interval is None else f" ({finding.interval[0]:.3g} to {finding.interval[1]:.3g})"
            return f"the knee is at {text(finding.load or 0.0)}{between}"
        case AnswerVerdict.FENCED:
            return f"throughput still rises at the fence of {answer.fence}: a limit of the server, not its knee"
        case AnswerVerdict.NOT_REACHED:
            return f"no knee up to {text(max(loads, default=0))}"
        case AnswerVerdict.ALREADY_SATURATED:
            return f"saturated from {text(min(loads, default=0))} on"
        case AnswerVerdict.TOO_FEW_STAGES:
            return f"too few valid stages to look for a knee: {sum(stage.valid for stage in answer.stages)}"
        case AnswerVerdict.SLO_INFEASIBLE:
            return f"the knee is at {text(finding.load or 0.0)}, and no stage left of it is known to be inside the SLO"
        case AnswerVerdict.MEASURED | AnswerVerdict.NOT_MEASURED:
            return f"{_rates(answer)}; {_safe(answer)}"


def _rates(answer: BenchAnswer) -> str:
    measured = {stage.load for stage in answer.stages if stage.valid and stage.loop == "open"}
    missing = [f"{rate:g}" for rate in answer.asked if rate not in measured]
    named = "1 rate was" if len(answer.asked) == 1 else f"{len(answer.asked)} rates were"
    return f"{named} asked for, " + (f"{', '.join(missing)}/s not measured" if missing else "all measured")


def _safe(answer: BenchAnswer) -> str:
    safe = answer.safe_rate_rps
    if safe is not None:
        return f"up to {safe.value:.3g} requests/s are inside the SLO"
    return "without an SLO none is called safe" if answer.slo is None else "none was shown to be inside the SLO"


def next_move(answer: BenchAnswer) -> str:
    """What to do with the answer; first of all, where the server went away, to find out why."""
    gone = outage(answer.stages)
    if gone is None:
        return _move(answer)
    look = f"look at the server's log for why it stopped answering at {gone.where}"
    if answer.verdict is AnswerVerdict.RESOLVED:
        return f"{look}; until then, {_move(answer)}"
    return f"{look}, start it again, and measure once more"


def _move(answer: BenchAnswer) -> str:
    if answer.axis is Axis.REQUEST_RATE:
        return _next_rate(answer)
    point = answer.operating_point
    match answer.verdict:
        case AnswerVerdict.RESOLVED if point is not None:
            return f"keep it at {point.load} concurrent requests: by max_num_seqs={point.load}, or at the gateway"
        case AnswerVerdict.RESOLVED | AnswerVerdict.SLO_INFEASIBLE:
            return "loosen the SLO, or measure loads below the knee for longer: --loads, --time"
        case AnswerVerdict.FENCED:
            return _at_the_fence(answer)
        case AnswerVerdict.NOT_REACHED if answer.asked:
            return f"measure higher loads too: --loads {_and_higher(answer.asked)}"
        case AnswerVerdict.NOT_REACHED:
            return "raise --max-load"
        case AnswerVerdict.ALREADY_SATURATED:
            return "send shorter requests (--workload), or give the server more hardware"
        case AnswerVerdict.TOO_FEW_STAGES | AnswerVerdict.MEASURED | AnswerVerdict.NOT_MEASURED:
            return _more_stages(answer)


def _more_stages(answer: BenchAnswer) -> str:
    """What keeps most stages from counting is what to change; where nothing does, there are too few."""
    reasons = [reason for stage in answer.stages for reason in stage.invalid_reasons]
    spoilt = {start: sum(reason.startswith(start) for reason in reasons) for start in (OTHERS, CLIENT_BOUND)}
    if spoilt[OTHERS]:
        return "take the others off the server while it is measured, or measure a replica that nobody uses"
    if reasons and spoilt[CLIENT_BOUND] > len(reasons) / 2:
        return "measure from a machine with cores to spare: the load generator was late by its own doing"
    if reasons:
        return "give the stages that were left out, each says why, more time: --time"
    if answer.interrupted:
        return "let it climb to its end"
    if answer.asked:
        return f"a knee needs {FEWEST_STAGES} loads or more: leave --loads out, or name some: --loads 1,2,4,8,16"
    return "raise --max-load: a knee needs more loads than there are up to there"


def _and_higher(asked: tuple[float, ...]) -> str:
    top = max(asked)
    return ",".join(f"{load:g}" for load in (*asked, 2 * top, 4 * top))


def _at_the_fence(answer: BenchAnswer) -> str:
    """More requests at once help only where those that the fence lets in are inside the limits."""
    point, ladder = answer.operating_point, climbed(answer.stages)
    over = None if answer.slo is None or not ladder else over_within_the_fence(ladder[-1], answer.slo)
    stay = (
        "loosen the SLO: no load is known to meet it" if point is None else f"stay at {point.load} concurrent requests"
    )
    if over:
        return f"{stay}: at load {ladder[-1].load}, within the fence, {over} already, so a higher one does not help"
    return f"start the server with a higher max_num_seqs and measure again, or {stay}"


def _next_rate(answer: BenchAnswer) -> str:
    safe = answer.safe_rate_rps
    if answer.verdict is AnswerVerdict.NOT_MEASURED and not answer.interrupted:
        return _more_stages(answer)
    if safe is None and answer.slo is None:
        return "give the limits that make a rate safe: --slo-ttft-p95 500ms --slo-itl-p95 50ms"
    rated = [stage for stage in answer.stages if stage.kind is StageKind.RATE]
    opened = {} if answer.slo is None else {rate.rate_rps: rate.time_option for rate in open_rates(rated, answer.slo)}
    if safe is None:
        lower = f"try lower rates: --rates {min(stage.load for stage in rated) / 2:.3g}"
        longer = [f"measure {rate:g} requests/s for longer, {option}" for rate, option in opened.items() if option]
        return " or ".join([*longer[:1], lower])
    if safe.high is not None:
        option = opened.get(safe.high)
        more = "" if option is None else f"; whether {safe.high:.3g} are safe too is open: {option} would tell"
        return f"let no more than {safe.value:.3g} requests/s in, at the gateway{more}"
    offered = safe.value if safe.offered_rps is None else safe.offered_rps
    silent = sorted({stage.load for stage in rated if stage.load > offered})
    if silent:
        named = ",".join(f"{rate:g}" for rate in silent)
        return f"measure higher rates again, no stage of theirs told enough: --rates {named}"
    return f"try rates above {offered:.3g}, the highest that was measured: --rates {2 * offered:.3g}"
