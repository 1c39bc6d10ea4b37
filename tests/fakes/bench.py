"""The answer of a bench as records, from stages of a known curve."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.analysis.benched import Asked, conclude
from tuner.bench_answer import BenchAnswer, ServerFacts
from tuner.ladder_answer import knee_figures, verdict_of
from tuner.load.workload import load_workload
from tuner.records import StageRecord


def bench_answer(stages: Sequence[StageRecord], **server: object) -> BenchAnswer:
    """What a bench with these stages answers, of a server whose fence is 64."""
    told = {"url": "http://10.0.0.1:8000", "model": "<b>llama</b>", "engine": "vllm", "has_metrics": True} | server
    found = conclude(stages, Asked(fence=64, fence_source="told"))
    workload = load_workload("chat-short")
    verdict = verdict_of(found.finding, is_feasible=True)
    return BenchAnswer(
        verdict=verdict,
        knee=knee_figures(found.finding, verdict, found.finding.signals),
        finding=found.finding,
        warnings=found.warnings,
        slo=found.slo,
        operating_point=found.operating_point,
        fence=found.fence,
        fence_source=found.fence_source,
        server=ServerFacts.model_validate(told),
        workload=workload,
        workload_hash=workload.hash,
        seed=7,
        prefix_cache="not reset: HTTP 404",
        stages=found.stages,
        wall_s=90.0,
        created="2026-12-01T00:00:00+00:00",
        kneetune_version="0.1.0",
    )
