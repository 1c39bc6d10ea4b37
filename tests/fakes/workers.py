"""Workers that launch nothing: stages come from the curve of `tests/fakes/records.py`, failures from a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tests.fakes.records import facts, rate_stage, stage
from tuner.engines.device_return import DeviceFull
from tuner.ladder import LadderStep, next_step
from tuner.measure.stage import MeasuredStage
from tuner.records import Failed, Measured, RequestRecord, StageKind, StageRecord, TrialRecord
from tuner.store import keep_stage
from tuner.trial import TrialEvent, TrialSpec, WorkerLost

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
        parallel_trials: int = 1,
        seed: int = 0,
    ) -> None:
        """A pool.

        Args:
            fills_in: the run, from 0, that leaves its device full, and one place less.
            parallel_trials: how many trials run at once.
            seed: decides which of them reports next.
            lost: how many of the first runs end with a dead worker.
            simulated: whether the engines say that they are.
        """
        self.parallel_trials = parallel_trials
        self.running: dict[int, Iterator[TrialEvent]] = {}
        self._rng = np.random.default_rng(seed)
        self._lost_now: list[int] = []
        self._simulated = simulated
        self._fills_in = fills_in
        self.launched: list[TrialSpec] = []
        self.stages_made: list[tuple[int, int]] = []
        """Trial and index of every stage, in order."""

        self._fails = fails
        self._reshape = reshape
        self._lost = lost

    def start(self, spec: TrialSpec) -> None:
        """Begin a trial; nothing of it happens before it is asked for."""
        assert len(self.running) < self.parallel_trials
        self.launched.append(spec)
        if len(self.launched) <= self._lost:
            self._lost_now.append(spec.number)
        self.running[spec.number] = self.run(spec)

    def next_event(self) -> tuple[int, TrialEvent | WorkerLost]:
        """The next report of one of the trials."""
        number = int(self._rng.choice(list(self.running)))
        if number in self._lost_now:
            self.give_up(number)
            return number, WorkerLost(detail="killed for memory")
        event = next(self.running[number])
        if isinstance(event, DeviceFull):
            self.parallel_trials -= 1
        if isinstance(event, TrialRecord):
            self.give_up(number)
        return number, event

    def give_up(self, number: int) -> None:
        """End a trial."""
        del self.running[number]

    def run(self, spec: TrialSpec) -> Iterator[TrialEvent]:
        """A trial's stages, then the trial."""
        failed = self._fails(spec)
        stages = list(spec.kept_stages)
        if failed is None:
            while (step := next_step(spec.plan, stages)) is not None:
                made = self._made(spec, step, index=len(stages))
                stages.append(made)
                self.stages_made.append((spec.number, made.index))
                keep_stage(spec.directory, MeasuredStage(record=made, requests=(_request(),), samples=()))
                yield made
        if self.launched.index(spec) == self._fills_in:
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

    def _made(self, spec: TrialSpec, step: LadderStep, *, index: int) -> StageRecord:
        if step.kind is StageKind.RATE:
            return rate_stage(spec.config, step.load, index=index)
        return self._reshape(stage(spec.config, int(step.load), index=index, kind=step.kind))


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
