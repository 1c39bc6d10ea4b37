"""`python -m engine plan`: what a start would do with the memory, measured as at a start, without serving.

The model is loaded and its largest steps are run, but no KV block is made and nothing claimed: it says what fits now.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from engine.config import ConfigError, EngineConfig, device_of_rank
from engine.limits import read_limits
from engine.memory import (
    DeviceMemory,
    DeviceShare,
    MemoryReport,
    NoKvMemoryError,
    NotEnoughMemoryError,
    Shortfall,
    hopeless_report,
    human,
    kv_blocks_in_force,
    num_blocks_of_ranks,
    requested_bytes,
    shortfall,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFit:
    """How many requests of one length the KV blocks hold at once."""

    tokens_per_request: int
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The calculation. With data parallelism it is that of each core, by the one with the fewest blocks."""

    config: EngineConfig
    memory: DeviceMemory
    requested_bytes: int
    report: MemoryReport | None = None
    """None where less is free than requested: a start would end there, before it loads anything."""

    num_blocks: int | None = None
    """KV blocks there would be; None where a start would be refused."""

    fits: tuple[RequestFit, ...] = ()
    """For a request of `max_model_len`, and for one of the length asked for."""

    problem: str | None = None
    """Why a start would be refused, and the way out, as it would say it."""

    shortfall: Shortfall | None = None
    """In figures, where too little is left for KV blocks."""

    warnings: tuple[str, ...] = ()


def plan(config: EngineConfig, *, tokens_per_request: int | None, as_json: bool) -> int:
    """Write the calculation to stdout; returns the exit code: 0 where a start would work, 1 where it would not.

    Raises:
        ConfigError: for a setting that can never work.
        DeviceLedgerError: where it cannot be known what is free.
    """
    calculated = memory_plan(config, tokens_per_request=tokens_per_request)
    text = json.dumps(_json(calculated), indent=1) if as_json else "\n".join(table(calculated))
    sys.stdout.write(text + "\n")
    return 0 if calculated.problem is None else 1


def memory_plan(config: EngineConfig, *, tokens_per_request: int | None = None) -> MemoryPlan:
    """Load, measure and calculate, for every core one after the other.

    Raises:
        ConfigError, DeviceLedgerError: as `plan`.
    """
    if config.executor != "torch":
        raise ConfigError(
            f"executor={config.executor!r} has no memory to measure, its law states it: leave out --executor and "
            "--law, or start it with `serve`, which logs the calculation"
        )
    ranks = []
    for rank in range(config.data_parallel_size):
        ranks.append(_plan_of_core(replace(config, device=device_of_rank(config.device, rank)), tokens_per_request))
        if ranks[-1].num_blocks is None:
            return ranks[-1]
    num_blocks = num_blocks_of_ranks([each.num_blocks for each in ranks if each.num_blocks is not None])
    return next(each for each in ranks if each.num_blocks == num_blocks)


def _plan_of_core(config: EngineConfig, tokens_per_request: int | None) -> MemoryPlan:
    from engine.device_memory import device_label, device_memory
    from engine.executor.blueprint import blueprint
    from engine.executor.torch import ModelRunner

    decided = blueprint(config)
    if tokens_per_request is not None and not 1 <= tokens_per_request <= decided.max_model_len:
        raise ConfigError(
            f"tokens_per_request={tokens_per_request} is not in 1 to max_model_len={decided.max_model_len}"
        )
    memory = device_memory(config, decided.device, limit_bytes=read_limits().memory_bytes)
    try:
        requested = requested_bytes(memory, config.gpu_memory_utilization, least_bytes=decided.least.total_bytes)
    except NotEnoughMemoryError as error:
        requested = int(memory.total_bytes * config.gpu_memory_utilization)
        return MemoryPlan(config=config, memory=memory, requested_bytes=requested, problem=str(error))
    share = DeviceShare(memory=memory, requested_bytes=requested)
    report = hopeless_report(decided.least, share, device=device_label(config, decided.device))
    if report is None:
        report = ModelRunner(decided).measure(share)
    measured = MemoryPlan(config=config, memory=memory, requested_bytes=requested, report=report)
    return with_blocks(measured, report, tokens_per_request, decided.warnings)


def with_blocks(
    measured: MemoryPlan, report: MemoryReport, tokens_per_request: int | None, warnings: tuple[str, ...]
) -> MemoryPlan:
    """Finish a calculation from what was measured. Pure."""
    config, layout, longest = measured.config, report.layout, report.max_model_len
    try:
        num_blocks, overridden = kv_blocks_in_force(config, report.budget, layout, max_model_len=longest)
    except NoKvMemoryError as error:
        missing = shortfall(report.budget, layout, max_model_len=longest)
        return replace(measured, problem=str(error), shortfall=missing, warnings=warnings)
    lengths = (longest,) if tokens_per_request is None else (longest, tokens_per_request)
    fits = tuple(
        RequestFit(tokens_per_request=length, num_requests=num_blocks // layout.blocks_for(length))
        for length in lengths
    )
    prone = preemption_prone(config, fits[-1])
    return replace(
        measured,
        num_blocks=num_blocks,
        fits=fits,
        warnings=(*warnings, *overridden, *([] if prone is None else [prone])),
    )


def preemption_prone(config: EngineConfig, fit: RequestFit) -> str | None:
    """A warning where more requests may run than the KV blocks hold, or None."""
    running = config.max_num_active_seqs or config.max_num_seqs
    if running <= fit.num_requests:
        return None
    name = "max_num_active_seqs" if config.max_num_active_seqs else "max_num_seqs"
    return (
        f"preemption-prone: {name}={running}, but the KV blocks hold {fit.num_requests} requests of "
        f"{fit.tokens_per_request} tokens at once"
    )


def table(calculated: MemoryPlan) -> list[str]:
    """The calculation as lines of text."""
    config, memory = calculated.config, calculated.memory
    cores = "" if config.data_parallel_size == 1 else f", for each of {config.data_parallel_size} cores"
    lines = [f"{config.model}{cores}"]
    lines += [_row(f"total of {config.device}", memory.total_bytes), _row("free now", memory.free_bytes)]
    lines += [_row(f"  held by pid {claim.pid}", claim.num_bytes) for claim in memory.claims]
    share = f"requested: total x {config.gpu_memory_utilization}"
    lines.append(_row(share, calculated.requested_bytes))
    if calculated.report is None:
        lines.append(_row("= short by", calculated.requested_bytes - memory.free_bytes))
    else:
        lines += _measured_rows(calculated, calculated.report)
    lines += [f"warning: {warning}" for warning in calculated.warnings]
    return lines if calculated.problem is None else [*lines, f"does not fit: {calculated.problem}"]


def _measured_rows(calculated: MemoryPlan, report: MemoryReport) -> Iterator[str]:
    budget, layout = report.budget, report.layout
    yield _row("- weights", budget.weights_bytes)
    yield _row("- activation peak", budget.activation_peak_bytes, f"by {report.peak_step}")
    yield _row("- request buffers", budget.request_buffers_bytes)
    yield _row("- non-torch", budget.non_torch_bytes)
    if budget.graph_bytes:
        yield _row("- captured graphs", budget.graph_bytes)
    yield _row("= KV cache", budget.kv_cache_bytes)
    missing = calculated.shortfall
    if missing is not None:
        yield _row(f"one request of {report.max_model_len} tokens", missing.needed_bytes)
        yield _row("= short by", missing.needed_bytes - budget.kv_cache_bytes)
    if calculated.num_blocks is not None:
        yield _row(f"/ a block of {layout.block_size} tokens", layout.block_bytes)
        yield _row("= blocks", calculated.num_blocks, unit="")
        yield _row("  tokens", calculated.num_blocks * layout.block_size, unit="")
        for fit in calculated.fits:
            yield _row(f"  requests of {fit.tokens_per_request} tokens at once", fit.num_requests, unit="")


def _row(name: str, number: int, note: str = "", *, unit: str = "bytes") -> str:
    sign = "-" if number < 0 else ""
    size = f"{sign}{human(abs(number))}" if unit else ""
    return f"  {name:<36}{number:>18,}{size:>14}  {note}".rstrip()


def _json(calculated: MemoryPlan) -> dict[str, object]:
    """The same figures for a program; what is not known is null."""
    report = calculated.report
    return {
        "starts": calculated.problem is None,
        "problem": calculated.problem,
        "device": calculated.config.device,
        "config": asdict(calculated.config),
        "memory": {
            "total_bytes": calculated.memory.total_bytes,
            "free_bytes": calculated.memory.free_bytes,
            "requested_bytes": calculated.requested_bytes,
            **({} if report is None else asdict(report.budget)),
        },
        "held_by": [{"pid": claim.pid, "bytes": claim.num_bytes} for claim in calculated.memory.claims],
        "activation_peak_step": None if report is None else report.peak_step,
        "max_model_len": None if report is None else report.max_model_len,
        "block_size": calculated.config.block_size,
        "block_bytes": None if report is None else report.layout.block_bytes,
        "num_blocks": calculated.num_blocks,
        "num_tokens": None if calculated.num_blocks is None else calculated.num_blocks * calculated.config.block_size,
        "fits": [asdict(fit) for fit in calculated.fits],
        "shortfall": None if calculated.shortfall is None else asdict(calculated.shortfall),
        "warnings": calculated.warnings,
    }
