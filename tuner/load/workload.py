"""What is sent and when, as a user describes it: lengths or a trace, what prompts share, sampling, arrivals."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from tuner.frozen import Record
from tuner.inputs import DurationS, read_preset, read_yaml, validated
from tuner.load.arrivals import AllAtOnce, Arrivals, Closed, Replayed, loop_of
from tuner.load.lengths import Length, Tokens
from tuner.load.traces import Trace, TraceSpec, read_trace
from tuner.records import Loop

_HASH_DIGITS = 12


class WorkloadError(ValueError):
    """A workload the engine cannot serve as described; the message holds both figures."""


class SharedPrefix(Record):
    """A beginning that many prompts have in common, such as a system prompt; it stands before `input_len`."""

    tokens: Tokens
    groups: int = Field(default=1, ge=1, le=1_000_000)
    """How many different ones there are, equally often."""

    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the requests that begin with one."""


class Chat(Record):
    """Several turns with one history: each sends all that was said before and `input_len` more."""

    turns: int = Field(ge=2, le=1000)
    think_time: DurationS = 0.0
    """Mean time between an answer and the next turn; drawn exponentially."""


class Workload(Record):
    """What is sent and when. Two workloads of one hash send the same kind of load."""

    name: str = "custom"
    why: str = "written out in the job"
    """Who sends such requests, and what they are good for in a tuning job."""

    input_len: Length | None = None
    output_len: Length | None = None
    temperature: float = Field(default=0.0, ge=0)
    ignore_eos: bool = True
    """Generate the asked number of tokens whatever the model says, so that stages are comparable."""

    length_correlation: float = Field(default=0.0, ge=-1, le=1)
    """Rank correlation (Spearman's) of input and output lengths."""

    shared_prefix: SharedPrefix | None = None
    chat: Chat | None = None
    trace: TraceSpec | None = None
    """Requests as they were once sent, in place of lengths; what was a pair stays one."""

    arrivals: Arrivals = Closed()
    api: Literal["completions", "chat"] = "completions"
    """`/v1/completions` with token ids, whose lengths are exact, or `/v1/chat/completions` with text, whose lengths
    are calibrated by two requests and counted by the server."""

    @model_validator(mode="after")
    def _lengths_or_a_trace(self) -> Self:
        if self.trace is None:
            missing = [name for name in ("input_len", "output_len") if getattr(self, name) is None]
            if missing:
                raise ValueError(f"{missing[0]!r} is missing: give both lengths, or a trace")
            if isinstance(self.arrivals, Replayed):
                raise ValueError("arrivals of kind trace replay a trace: give one under `trace`")
        else:
            own = {"input_len", "output_len", "length_correlation", "shared_prefix", "chat"}
            # By value, not by what was written: a workload that is kept and read back has every field.
            both = sorted(name for name in own if getattr(self, name) != type(self).model_fields[name].default)
            if both:
                raise ValueError(f"a trace brings its own {both[0]}: leave {both[0]} out")
        if self.chat is not None and isinstance(self.arrivals, AllAtOnce):
            raise ValueError("a batch is sent all at once and has no second turns: leave chat out")
        return self

    @property
    def hash(self) -> str:
        """Twelve hex digits that change with anything that is sent; the name and the reason are not sent.

        What came later than the first workloads counts only where it is used, so that theirs stay as they were.
        """
        later = ("length_correlation", "shared_prefix", "chat", "trace", "arrivals", "api")
        unused = {name for name in later if getattr(self, name) == type(self).model_fields[name].default}
        unused |= {name for name in ("input_len", "output_len") if self.trace is not None}
        sent = self.model_dump_json(exclude={"name", "why", *unused})
        return hashlib.sha256(sent.encode()).hexdigest()[:_HASH_DIGITS]

    @property
    def loop(self) -> Loop:
        """Who decides when the next request is sent."""
        return loop_of(self.arrivals)

    @property
    def has_turns(self) -> bool:
        """Whether a request may repeat the answer to another."""
        return self.chat is not None or (self.trace is not None and self.loop == "closed")

    @property
    def shares_prefixes(self) -> bool:
        """Whether a request may begin as another does, so that what a prefix cache holds counts."""
        if self.trace is not None:
            return any(row.segments or row.session is not None for row in read_trace(self.trace).rows)
        return self.shared_prefix is not None or self.chat is not None

    @property
    def thinks(self) -> bool:
        """Whether users pause between their requests."""
        pauses = isinstance(self.arrivals, Closed) and self.arrivals.think_time > 0
        return pauses or (self.chat is not None and self.chat.think_time > 0)

    def longest_request_tokens(self, max_model_len: int | None = None) -> int:
        """Prompt and output of the longest request this can send to contexts of this length. Unit: tokens."""
        if (trace := self._trace_within(max_model_len)) is not None:
            return max(row.input_tokens + row.output_tokens for row in trace.rows)
        turns = self.chat.turns if self.chat else 1
        return self._prefix_tokens + turns * (self.lengths[0].longest + self.lengths[1].longest)

    def mean_request_tokens(self, max_model_len: int | None = None) -> float:
        """Prompt and output of the mean request this sends to contexts of this length. Unit: tokens."""
        if (trace := self._trace_within(max_model_len)) is not None:
            return sum(row.input_tokens + row.output_tokens for row in trace.rows) / len(trace.rows)
        mean_turn = (self.chat.turns + 1) / 2 if self.chat else 1
        prefix = self._prefix_tokens * (self.shared_prefix.share if self.shared_prefix else 0)
        return prefix + mean_turn * (self.lengths[0].mean + self.lengths[1].mean)

    @property
    def lengths(self) -> tuple[Length, Length]:
        """Input and output lengths of a workload that is no trace."""
        if self.input_len is None or self.output_len is None:
            raise ValueError(f"workload {self.name}: a trace has no length distributions")
        return self.input_len, self.output_len

    @property
    def _prefix_tokens(self) -> int:
        return self.shared_prefix.tokens if self.shared_prefix else 0

    def _trace_within(self, max_model_len: int | None) -> Trace | None:
        """What of the trace fits; all of it where no length is known."""
        if self.trace is None or max_model_len is None:
            return None if self.trace is None else read_trace(self.trace)
        return self.fitting_trace(max_model_len)

    def fitting_trace(self, max_model_len: int) -> Trace | None:
        """The workload's trace without what no context of this length holds; None where it has none.

        Raises:
            WorkloadError: where nothing is left.
        """
        if self.trace is None:
            return None
        trace = read_trace(self.trace).fitting(max_model_len)
        if not trace.rows:
            raise WorkloadError(
                f"workload {self.name}: none of the {trace.num_left_out} requests of {self.trace.path} fits "
                f"max_model_len={max_model_len}: raise max_model_len or take another trace"
            )
        return trace

    def check_fits(self, max_model_len: int) -> None:
        """Refuse a workload the engine cannot serve whole; requests of a trace that are too long are left out.

        Raises:
            WorkloadError: where the longest request, or every request of a trace, is above `max_model_len`.
        """
        if self.fitting_trace(max_model_len) is None and self.longest_request_tokens() > max_model_len:
            turns = f" in {self.chat.turns} turns" if self.chat else ""
            raise WorkloadError(
                f"workload {self.name}: its longest request has {self.longest_request_tokens()} tokens "
                f"({self._prefix_tokens + self.lengths[0].longest} in, {self.lengths[1].longest} out{turns}), above "
                f"max_model_len={max_model_len}: shorten the workload or raise max_model_len"
            )


def load_workload(name_or_mapping: str | Mapping[str, object]) -> Workload:
    """A preset by its name, or a workload written out as a mapping (`name` and `why` may be left out there).

    Raises:
        InputError: for an unknown preset (naming the nearest and all known) or a mapping that says something wrong.
    """
    if isinstance(name_or_mapping, str):
        preset = read_preset("workloads", name_or_mapping)
        data = {"name": name_or_mapping, **preset} if isinstance(preset, dict) else preset
        return validated(Workload, data, where=f"workload {name_or_mapping!r}")
    return validated(Workload, name_or_mapping, where="workload")


def read_workload(path: Path) -> Workload:
    """Read a workload's YAML file; paths in it are relative to it.

    Raises:
        InputError: for a file that cannot be read, or says something wrong.
    """
    read = read_yaml(path)
    named = {"name": path.stem, **read} if isinstance(read, dict) else read
    return validated(Workload, paths_from(path.parent, named), where=str(path))


def paths_from(folder: Path, workload: object) -> object:
    """A workload as plain data, the relative paths of its trace taken from `folder` on."""
    trace = workload.get("trace") if isinstance(workload, dict) else None
    if not isinstance(workload, dict) or not isinstance(trace, dict):
        return workload
    placed = {
        key: str(folder / Path(value).expanduser())
        for key, value in trace.items()
        if key in ("path", "tokenizer") and isinstance(value, str)
    }
    return {**workload, "trace": {**trace, **placed}}
