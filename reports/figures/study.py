"""The measured stages charts are made of."""

from __future__ import annotations

from collections.abc import Iterable

from tuner.engine_config import EngineConfig
from tuner.records import Measured, StageRecord, TrialRecord, TrialRole
from tuner.wording import further, memory_share


def config_text(config: EngineConfig) -> str:
    """The three parameters that are always tuned, and what else is not at its default, in one line."""
    three = f"{config.max_num_seqs} sequences, budget {config.max_num_batched_tokens}, share {memory_share(config)}"
    return ", ".join([three, *(f"{name} {value}" for name, value in further(config).items())])


def study_stages(trials: Iterable[TrialRecord]) -> list[tuple[TrialRecord, StageRecord]]:
    """Each stage of the study's measured trials with its trial; confirmations are not among them."""
    return [
        (trial, stage)
        for trial in trials
        if trial.role is TrialRole.STUDY and isinstance(trial.outcome, Measured)
        for stage in trial.outcome.stages
    ]
