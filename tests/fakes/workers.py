"""Workers that launch nothing: stages come from the curve of `tests/fakes/records.py`, failures from a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.fakes.records import facts, stage
from tuner.engines.device_return import DeviceFull
from tuner.ladder import next_step
from tuner.measure.stage import MeasuredStage
from tuner.records import Failed, Measured, RequestRecord, StageRecord, TrialRecord
from tuner.store import keep_stage
from tuner.trial import TrialEvent, TrialSpec, WorkerLostError

Rule = Callable[[TrialSpec], Failed | None]
"""Says whether and how a launch fails."""

Reshape = Callable[[StageRecord], StageRecord]
"""Changes a stage the curve made."""


class FakeWorkers:
    """Runs trials the way `Workers` does, without Ray and without an engine."""

    def __init__(
        self,
        *,
        fails: Rule = lambda _: None,
        reshape: Reshape = lambda made: made,
        lost: int = 0,
        simulated: bool = False,
        fills_in: int | None = None,
    ) -> None:
        """A pool.

        Args:
            lost: how many of the first runs end with a dead worker.
            fills_in: the run, from 0, that leaves its device full.
            simulated: whether the engines say that they are.
        """
        self._simulated = simulated
        self._fills_in = fills_in
        self.launched: list[TrialSpec] = []
        self.stages_made: list[tuple[int, int]] = []
        """Trial and index of every stage, in order."""

        self._fails = fails
        self._reshape = reshape
        self._lost = lost

    def run(self, spec: TrialSpec) -> Iterator[TrialEvent]:
        """A trial's stages, then the trial."""
        self.launched.append(spec)
        if len(self.launched) <= self._lost:
            raise WorkerLostError("killed for memory")
        failed = self._fails(spec)
        stages = list(spec.kept_stages)
        if failed is None:
            while (step := next_step(spec.plan, stages)) is not None:
                made = self._reshape(stage(spec.config, step.load, index=len(stages), kind=step.kind))
                stages.append(made)
                self.stages_made.append((spec.number, made.index))
                keep_stage(spec.directory, MeasuredStage(record=made, requests=(_request(),), samples=()))
                yield made
        if len(self.launched) - 1 == self._fills_in:
            yield DeviceFull(device="GPU-a", text="nothing is launched on GPU-a any more: 5 bytes more are in use")
        outcome = failed or Measured(
            facts=facts(spec.config).model_copy(update={"simulated": self._simulated}), stages=tuple(stages)
        )
        yield TrialRecord(
            number=spec.number,
            role=spec.role,
            config=spec.config,
            origin=spec.origin,
            outcome=outcome,
            start_s=1.0,
            measure_s=sum(each.wall_s for each in stages),
            wall_s=2.0,
        )


def _request() -> RequestRecord:
    return RequestRecord(
        index=0,
        intended_s=0.0,
        sent_s=0.0,
        first_token_s=0.02,
        finished_s=0.3,
        num_prompt_tokens=64,
        num_output_tokens=32,
        asked_output_tokens=32,
    )
