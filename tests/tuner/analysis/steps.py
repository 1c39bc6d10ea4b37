"""Ladders of an engine whose step time follows a roofline law, so that what saturates it is known."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fakes import records
from tuner.records import EngineFacts, StageRecord, StepFigures

LOADS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A step of n running requests takes base + combine(computing, reading). Milliseconds."""

    base_ms: float = 0.0
    token_ms: float
    """Computing one token."""

    weights_ms: float
    """Reading all weights once."""

    context_ms: float
    """Reading one request's keys and values."""

    prompt: int = 256
    output: int = 64
    overlap: bool = True
    """Whether computing and reading overlap (the larger decides) or follow each other."""

    def computing_ms(self, load: int) -> float:
        """Of a mean step at `load`: every running request brings its prompt for each output it generates."""
        return self.token_ms * load * (1 + self.prompt / self.output)

    def reading_ms(self, load: int) -> float:
        """Of a step at `load`."""
        return self.weights_ms + self.context_ms * load

    def step_ms(self, computing_ms: float, reading_ms: float) -> float:
        """The whole step."""
        both = max(computing_ms, reading_ms) if self.overlap else computing_ms + reading_ms
        return self.base_ms + both

    def stage(self, load: int) -> StageRecord:
        """What would be measured at `load`."""
        step = self.step_ms(self.computing_ms(load), self.reading_ms(load))
        throughput = 1000 * load / step
        ttft = self.step_ms(self.token_ms * self.prompt, self.weights_ms)
        itl = self.step_ms(self.token_ms * load, self.reading_ms(load))
        return records.stage(records.CHOSEN, load, index=LOADS.index(load)).model_copy(
            update={
                "output_throughput": records.estimate(throughput),
                "ttft_p50_ms": records.estimate(ttft),
                "itl_p50_ms": records.estimate(itl),
                "mean_prompt_tokens": float(self.prompt),
                "mean_output_tokens": float(self.output),
                "num_preemptions": 0,
                "kv_cache_usage_peak": load / 100,
                "mean_waiting": 0.0,
                "steps": StepFigures(mean_tokens=load * (1 + self.prompt / self.output), per_s=1000 / step),
            }
        )

    def ladder(self) -> tuple[StageRecord, ...]:
        """Stages at every load."""
        return tuple(self.stage(load) for load in LOADS)

    def facts(self) -> EngineFacts:
        """Bytes in proportion to the time it takes to read them: a million a millisecond."""
        return records.facts(records.CHOSEN).model_copy(
            update={
                "weights_bytes": round(1e6 * self.weights_ms),
                "num_gpu_blocks": 100,
                "kv_block_bytes": round(1e6 * self.context_ms),
                "device": "cuda",
            }
        )


COMPUTE = Law(base_ms=2, token_ms=0.5, weights_ms=4, context_ms=0.05)
BANDWIDTH = Law(base_ms=2, token_ms=0.01, weights_ms=4, context_ms=1.0)
