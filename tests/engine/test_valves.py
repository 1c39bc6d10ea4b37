"""What the engine takes in before it refuses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.valves import RecentRate, Valves


def valves(*, reqs: int | None = None, tokens: int | None = None) -> Valves:
    """Valves with these limits."""
    return Valves(EngineConfig(model="m", max_num_queued_reqs=reqs, max_num_queued_tokens=tokens))


def test_one_request_more_than_the_limit_is_refused_with_both_numbers() -> None:
    """Whoever reads the refusal knows what to change."""
    limited = valves(reqs=2)
    assert limited.try_enter([5], now_s=0) is None
    assert limited.try_enter([5], now_s=0) is None
    overload = limited.try_enter([5], now_s=0)
    assert overload is not None
    assert overload.valve == "max_num_queued_reqs"
    assert "2 requests in flight" in overload.message
    assert "max_num_queued_reqs=2" in overload.message
    limited.note_end(5, in_prefill=True, now_s=1)
    assert limited.try_enter([5], now_s=1) is None


def test_several_prompts_enter_together_or_not_at_all() -> None:
    """Half of an answer with n choices is no answer."""
    limited = valves(reqs=3)
    assert limited.try_enter([5, 5], now_s=0) is None
    assert limited.try_enter([5, 5], now_s=0) is not None
    assert limited.num_requests == 2
    assert limited.try_enter([5], now_s=0) is None


def test_more_at_once_than_the_limit_can_never_enter() -> None:
    """A client told to come back later would do so for ever."""
    assert valves(reqs=3).never(3) is None
    assert valves().never(10_000) is None
    reason = valves(reqs=3).never(4)
    assert reason is not None
    assert "max_num_queued_reqs=3" in reason


def test_prompts_enter_until_the_limit_is_reached_however_long_they_are() -> None:
    """As in vLLM, where the setting is deployed: what is in prefill decides, not what comes."""
    limited = valves(tokens=100)
    assert limited.try_enter([99], now_s=0) is None
    assert limited.try_enter([500], now_s=0) is None
    overload = limited.try_enter([1], now_s=0)
    assert overload is not None
    assert overload.valve == "max_num_queued_tokens"
    assert "599 prompt tokens in prefill have reached max_num_queued_tokens=100" in overload.message
    limited.note_first_token(500, now_s=1)
    assert limited.try_enter([1], now_s=1) is None
    assert limited.try_enter([1], now_s=1) is not None


def test_a_prompt_counts_until_its_first_token_only() -> None:
    """Decoding requests are no prefill backlog."""
    limited = valves(tokens=100)
    for _ in range(10):
        assert limited.try_enter([100], now_s=0) is None
        limited.note_first_token(100, now_s=0)
    assert limited.num_prefill_tokens == 0


@given(
    steps=st.lists(st.tuples(st.sampled_from(["enter", "token", "end"]), st.integers(1, 60)), max_size=60),
    reqs=st.none() | st.integers(1, 6),
    tokens=st.none() | st.integers(1, 100),
)
def test_counts_are_those_of_the_requests_that_are_there(
    steps: list[tuple[str, int]], reqs: int | None, tokens: int | None
) -> None:
    """A count that drifts closes the valve for ever, or opens it for good."""
    limited = valves(reqs=reqs, tokens=tokens)
    there: list[tuple[int, bool]] = []
    for now_s, (what, number) in enumerate(steps):
        if what == "enter":
            if limited.try_enter([number], now_s=now_s) is None:
                there.append((number, True))
        elif what == "token" and there and there[number % len(there)][1]:
            index = number % len(there)
            there[index] = (there[index][0], False)
            limited.note_first_token(there[index][0], now_s=now_s)
        elif what == "end" and there:
            length, in_prefill = there.pop(number % len(there))
            limited.note_end(length, in_prefill=in_prefill, now_s=now_s)
        prefills = [length for length, in_prefill in there if in_prefill]
        assert limited.num_requests == len(there)
        assert limited.num_prefill_tokens == sum(prefills)
        assert reqs is None or len(there) <= reqs
        assert tokens is None or sum(prefills) < tokens + max(prefills, default=0)


def test_retry_after_follows_the_recent_rate() -> None:
    """A client that comes back when there is room is not refused twice."""
    rate = RecentRate()
    assert rate.seconds_for(100, now_s=0) == 1
    for second in range(5):
        rate.add(2, now_s=second)
    assert rate.seconds_for(5, now_s=5) == 3  # 10 in 5 s
    assert rate.seconds_for(1, now_s=5) == 1
    assert rate.seconds_for(10**6, now_s=5) == 60
    assert rate.seconds_for(100, now_s=100) == 1  # what was long ago says nothing
