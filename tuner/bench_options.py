"""What to measure a running server with, as asked for on the command line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tuner.answer import Slo
from tuner.frozen import Record
from tuner.inputs import DurationS, InputError
from tuner.job import MeasureSpec
from tuner.load.arrivals import mean_rate_rps
from tuner.load.workload import Workload


class BenchOptions(Record):
    """What to measure a running server with."""

    model: str | None = None
    workload: Workload
    max_load: int = Field(default=1024, ge=2, le=65_536)
    loads: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = ()
    """Measure just these; none climbs until the knee is behind."""

    rates: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] = ()
    """Measure just these rates, in requests per second, and no users who wait."""

    arrivals: Literal["poisson", "constant"] | None = None
    """How requests come at a rate. Without `rates`, the safe rate is looked for below what users got."""

    slo_ttft_p95: DurationS | None = None
    slo_itl_p95: DurationS | None = None
    measure: MeasureSpec
    fence: int | None = Field(default=None, ge=1)
    seed: int = Field(ge=0)
    command: str = ""
    """The command line it was asked for with; it holds no key."""

    @field_validator("slo_ttft_p95", "slo_itl_p95")
    @classmethod
    def _positive(cls, seconds: float | None) -> float | None:
        if seconds is not None and seconds <= 0:
            raise ValueError("a limit must be above zero")
        return seconds

    @model_validator(mode="after")
    def _one_axis(self) -> BenchOptions:
        loop = self.workload.loop
        if loop == "batch":
            raise ValueError(f"workload {self.workload.name}: a batch has neither users nor a rate: leave arrivals out")
        if self.loads and (self.rates or loop == "open"):
            raise ValueError("--loads are users who wait, and this is measured at rates: leave --loads out")
        if self.arrivals is not None and loop == "open":
            raise ValueError(f"workload {self.workload.name} says itself how requests come: leave --arrivals out")
        if self.workload.chat is not None and (self.rates or self.arrivals is not None):
            raise ValueError(
                f"workload {self.workload.name} is a chat with turns, and a rate would be of conversations, not of "
                "requests: leave --rates and --arrivals out, or take a workload without turns"
            )
        if loop == "open" and not self.rates and self.workload.trace is None:
            raise ValueError(f"workload {self.workload.name} has arrivals and no rate: give --rates 1,2,4")
        return self

    @property
    def slo(self) -> Slo | None:
        """The limits, where both were given."""
        if self.slo_ttft_p95 is None or self.slo_itl_p95 is None:
            return None
        return Slo(ttft_p95_ms=1000 * self.slo_ttft_p95, itl_p95_ms=1000 * self.slo_itl_p95)

    def on(self, max_model_len: int) -> BenchOptions:
        """These options for a server with contexts of this length: a trace's own rate is that of what fits them.

        So what is sent goes out at the trace's own times, however much is left out.

        Raises:
            InputError: where no rate was given and the trace has none.
        """
        trace = self.workload.fitting_trace(max_model_len)
        if self.rates or self.workload.loop != "open" or trace is None:
            return self.model_copy(update={"rates": tuple(sorted(set(self.rates)))})
        if trace.times_s is None:
            raise InputError(f"workload {self.workload.name}: its trace has no times: give --rates")
        try:
            return self.model_copy(update={"rates": (mean_rate_rps(trace.times_s),)})
        except ValueError as error:
            raise InputError(
                f"workload {self.workload.name}: of its trace, within max_model_len={max_model_len}: {error}: "
                "give --rates, or take more of it"
            ) from None
