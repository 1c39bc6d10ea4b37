"""What one iteration will do (`StepPlan`) and did (`StepResult`): plain values between scheduler and executor."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import SamplingParams


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: compute `token_ids` at positions [start, start + len(token_ids)).

    Nobody changes one once it is made; it is not frozen only because a step makes one for every running request, and a
    frozen one takes several times as long.
    """

    request_id: str
    token_ids: tuple[int, ...]
    """The tokens to compute: one for a decode, a chunk of the prompt for a prefill."""

    start: int
    """Position of the first of them: tokens computed before this step."""

    block_ids: tuple[int, ...]
    """The request's whole block table: position p lives in block `block_ids[p // block_size]`."""

    samples: bool
    """Whether computation catches up with the known tokens here, so that a next token is drawn."""

    output_index: int
    """Index of the token this step may draw among the request's outputs; with `seed` it fixes the draw."""

    sampling: SamplingParams

    prompt_token_ids: tuple[int, ...] = ()
    """The whole prompt, where `sampling` has penalties and a token is drawn; else empty."""

    output_token_ids: tuple[int, ...] = ()
    """Every token generated so far, under the same condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one iteration will do, decided before anything is computed."""

    scheduled: tuple[ScheduledRequest, ...]
    """In the scheduler's order: the running list first, then the newly admitted."""

    admitted: tuple[str, ...] = ()
    """Requests admitted in this step for the first time."""

    resumed: tuple[str, ...] = ()
    """Requests admitted again after a preemption."""

    preempted: tuple[str, ...] = ()
    """Requests preempted by this step, in the order of preemption."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens computed in this step. Unit: tokens."""
        return sum([len(item.token_ids) for item in self.scheduled])

    @property
    def num_decodes(self) -> int:
        """Requests that compute the one token they drew last. Unit: requests."""
        return len([item for item in self.scheduled if len(item.token_ids) == 1 and item.output_index > 0])

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and of outputs recomputed after a preemption. Unit: tokens."""
        return self.num_scheduled_tokens - self.num_decodes

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose keys and values the step reads: those before it and its own, over all requests. Unit: tokens."""
        return sum([item.start + len(item.token_ids) for item in self.scheduled])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a drawn token was, before temperature and cuts, and which were the likeliest; natural logarithms."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), the most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one iteration did: the token drawn for every scheduled request whose `samples` was true."""

    sampled_token_ids: dict[str, int]
    """Request id → token id."""

    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    """Of the requests that asked for them."""
