"""What out-of-memory failures teach: which settings not to launch any more, and how high a share to recommend. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tuner.engine_config import EngineConfig
from tuner.frozen import Record
from tuner.records import Failed, FailureKind, TrialRecord
from tuner.wording import config_text

_COMPARED = frozenset({"max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_model_len"})
"""What decides between two settings that hold the same things in memory."""

_HOLDS_NO_MEMORY = frozenset(
    {
        *("enable_chunked_prefill", "enable_prefix_caching", "long_prefill_token_threshold", "watermark"),
        *("scheduler_reserve_full_isl", "max_num_queued_reqs", "max_num_queued_tokens"),
    }
)

OUT_OF_MEMORY = frozenset(
    {
        FailureKind.OOM_STARTUP,
        FailureKind.OOM_GRAPH_CAPTURE,
        FailureKind.OOM_SAMPLER_WARMUP,
        FailureKind.OOM_RUNTIME,
    }
)
"""Failures by which more memory was taken than there is; `no_kv_memory` is the opposite: too little was asked for."""


class ShareCeiling(Record):
    """The highest share to recommend, and why it is not higher."""

    gpu_memory_utilization: float
    reason: str


def ruled_out(config: EngineConfig, trials: Sequence[TrialRecord]) -> Failed | None:
    """How a launch of `config` would fail for memory as one of `trials` did, or None.

    Args:
        config: a setting that is proposed.
        trials: what was launched so far, in any role; the others count for nothing.
    """
    for trial in trials:
        outcome = trial.outcome
        if outcome.outcome != "failed" or not trial.launched or outcome.kind not in _DEMANDS_NO_LESS:
            continue
        if _is_alike(config, trial.config) and _DEMANDS_NO_LESS[outcome.kind](config, trial.config):
            detail = (
                f"trial {trial.number} failed with {outcome.kind.value} at {config_text(trial.config)}, "
                f"and {config_text(config)} would leave no more memory"
            )
            return Failed(kind=outcome.kind, detail=detail)
    return None


def share_ceiling(trials: Sequence[TrialRecord], *, margin: float) -> ShareCeiling | None:
    """The highest share that passed less `margin`, where a higher one ran out of memory; None where none did.

    The share that just passed stands next to one that did not: what a start needs varies by as much.

    Args:
        trials: what was launched so far, in any role.
        margin: share of the device to keep between.
    """
    passed = [trial.config.share for trial in trials if trial.outcome.outcome == "measured"]
    failed = [
        (trial.config.share, trial.number, trial.outcome.kind.value)
        for trial in trials
        if trial.outcome.outcome == "failed" and trial.launched and trial.outcome.kind in OUT_OF_MEMORY
    ]
    highest = max(passed, default=0.0)
    above = [failure for failure in failed if failure[0] > highest]
    if not above or highest <= margin:
        return None
    share, number, kind = min(above)
    return ShareCeiling(
        gpu_memory_utilization=round(highest - margin, 6),
        reason=(
            f"{highest:g} is the highest share that passed and {share:g} failed with {kind} in trial {number}, so that "
            f"{margin:g} is kept below it"
        ),
    )


def _is_alike(config: EngineConfig, failed: EngineConfig) -> bool:
    """Whether both hold the same things in memory, so that share, rows, steps and length tell which needs more."""
    held = EngineConfig.model_fields.keys() - _COMPARED - _HOLDS_NO_MEMORY
    return all(getattr(config, name) == getattr(failed, name) for name in held)


def _no_less_share(config: EngineConfig, failed: EngineConfig) -> bool:
    """Graphs are captured when the KV cache has taken the rest of the share: only a smaller one leaves them room."""
    return config.share >= failed.share


def _no_less_share_and_rows(config: EngineConfig, failed: EngineConfig) -> bool:
    return _no_less_share(config, failed) and config.max_num_seqs >= failed.max_num_seqs


def _more_share_or_no_fewer_rows(config: EngineConfig, failed: EngineConfig) -> bool:
    """The sampler's rows come last: fewer of them may do, or a smaller share, but never a larger one."""
    more_share = config.share > failed.share
    return more_share or _no_less_share_and_rows(config, failed)


def _no_less_share_rows_and_budget(config: EngineConfig, failed: EngineConfig) -> bool:
    """A step under load takes more than was measured at start, by what it computes: a smaller budget may do."""
    return _no_less_share_and_rows(config, failed) and config.max_num_batched_tokens >= failed.max_num_batched_tokens


def _no_less_share_and_steps(config: EngineConfig, failed: EngineConfig) -> bool:
    """Weights and the profiled step come before the KV cache: a smaller step may start at the same share."""
    return _no_less_share(config, failed) and _no_smaller_steps(config, failed)


def _no_more_share_and_no_smaller_steps(config: EngineConfig, failed: EngineConfig) -> bool:
    no_more_share = config.share <= failed.share
    return no_more_share and _no_smaller_steps(config, failed)


def _no_smaller_steps(config: EngineConfig, failed: EngineConfig) -> bool:
    return (
        config.max_num_seqs >= failed.max_num_seqs
        and config.max_num_batched_tokens >= failed.max_num_batched_tokens
        and (config.max_model_len or math.inf) >= (failed.max_model_len or math.inf)
    )


_DEMANDS_NO_LESS: Mapping[FailureKind, Callable[[EngineConfig, EngineConfig], bool]] = {
    FailureKind.OOM_GRAPH_CAPTURE: _no_less_share,
    FailureKind.OOM_SAMPLER_WARMUP: _more_share_or_no_fewer_rows,
    FailureKind.OOM_RUNTIME: _no_less_share_rows_and_budget,
    FailureKind.OOM_STARTUP: _no_less_share_and_steps,
    FailureKind.NO_KV_MEMORY: _no_more_share_and_no_smaller_steps,
}
"""For each kind of failure, whether a setting leaves no more of the memory that one was short of."""
