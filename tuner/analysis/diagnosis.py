"""What saturates at a knee, told from the stages around the bend; a guess is never made."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.answer import KneeFinding, LadderVerdict
from tuner.records import CLIMB_KINDS, EngineConfig, StageRecord

FULL_KV_CACHE = 0.95
WAITING_SHARE = 0.1
"""Share of the load that must be seen waiting before waiting means anything."""


def binding(stages: Sequence[StageRecord], knee: KneeFinding, config: EngineConfig) -> str | None:
    """What holds the curve back: `fence`, `kv_blocks`, `token_budget` or `compute`; None where it cannot be told.

    The bend is the knee's stage and the next one past it. Requests that wait there while the fence has room and the
    KV cache too wait for the step's tokens; with nothing waiting and KV blocks free, what is left is compute.
    """
    if knee.verdict is LadderVerdict.FENCED:
        return "fence"
    bend = _bend(stages, knee)
    if not bend:
        return None
    if any((stage.num_preemptions or 0) > 0 or (stage.kv_cache_usage_peak or 0.0) >= FULL_KV_CACHE for stage in bend):
        return "kv_blocks"
    if any(stage.kv_cache_usage_peak is None or stage.num_preemptions is None for stage in bend):
        return None
    past = bend[-1]
    if past.mean_running is None or past.mean_waiting is None:
        return None
    if past.mean_waiting < WAITING_SHARE * past.load:
        return "compute"
    return "token_budget" if past.mean_running < 0.9 * config.fence else "fence"


def _bend(stages: Sequence[StageRecord], knee: KneeFinding) -> list[StageRecord]:
    """The knee's stage and the next unfenced one past it; for a ladder saturated from the start, its first two."""
    ladder = sorted(
        (stage for stage in stages if stage.valid and not stage.fenced and stage.kind in CLIMB_KINDS),
        key=lambda stage: stage.load,
    )
    if knee.verdict is LadderVerdict.ALREADY_SATURATED:
        return ladder[:2]
    if knee.verdict is not LadderVerdict.KNEE or knee.load is None:
        return []
    return [stage for stage in ladder if stage.load >= (knee.load or 0.0)][:2]
