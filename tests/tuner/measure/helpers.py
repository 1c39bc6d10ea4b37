"""Request records for tests of pure figures."""

from __future__ import annotations

from tuner.records import RequestRecord


def record(
    *,
    index: int = 0,
    intended_s: float = 0.0,
    sent_s: float | None = None,
    times_s: tuple[float, ...] = (1.0,),
    finished_s: float | None = None,
    error: str | None = None,
    unfinished: bool = False,
) -> RequestRecord:
    """A request whose tokens arrived at these times, and which ended with the last unless told otherwise."""
    return RequestRecord(
        index=index,
        intended_s=intended_s,
        sent_s=intended_s if sent_s is None else sent_s,
        first_token_s=times_s[0] if times_s else None,
        finished_s=times_s[-1] if finished_s is None else finished_s,
        token_times_s=times_s,
        num_prompt_tokens=10,
        num_output_tokens=len(times_s),
        asked_output_tokens=len(times_s),
        error=error,
        unfinished=unfinished,
    )
