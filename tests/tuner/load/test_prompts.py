"""What prompts share is what the workload says, and what they do not share nobody has seen."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tuner.inputs import InputError
from tuner.load.prompts import Answer, Conversation, PromptRequest, conversations
from tuner.load.text import TextScale
from tuner.load.workload import Workload, WorkloadError, load_workload

LENGTHS: dict[str, Any] = {
    "input_len": {"kind": "uniform", "low": 3, "high": 9},
    "output_len": {"kind": "fixed", "tokens": 5},
}


def workload(**more: Any) -> Workload:
    """A small workload and what is new about it."""
    return load_workload({**LENGTHS, **more})


def drawn(of: Workload, count: int, *, entropy: tuple[int, ...] = (0, 1), **more: Any) -> list[Conversation]:
    """The first conversations."""
    return list(islice(conversations(of, token_ids=range(256), max_model_len=10_000, entropy=entropy, **more), count))


def firsts(of: Workload, count: int, **more: Any) -> list[PromptRequest]:
    """The first request of each."""
    return [next(each) for each in drawn(of, count, **more)]


def trace(folder: Path, rows: list[dict[str, Any]], arrivals: str = "closed") -> Workload:
    """A workload that is a trace."""
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_workload({"trace": {"path": str(path), "format": "jsonl"}, "arrivals": {"kind": arrivals}})


def test_a_shared_prefix_is_one_of_its_groups_and_the_rest_is_unique() -> None:
    """Prefix caching is measured at the hit rate that was asked for, neither more nor less."""
    asked = workload(shared_prefix={"tokens": 20, "groups": 3, "share": 0.5})
    requests = firsts(asked, 400)
    sharing = [request for request in requests if request.num_shared_tokens]
    assert len(sharing) == pytest.approx(200, abs=40)
    assert {request.num_shared_tokens for request in sharing} == {20}
    assert len({request.prompt_token_ids[:20] for request in sharing}) == 3
    assert all(23 <= len(request.prompt_token_ids) <= 29 for request in sharing)
    assert all(len(request.prompt_token_ids) == request.num_prompt_tokens for request in requests)
    alone = [request.prompt_token_ids[:20] for request in requests if not request.num_shared_tokens]
    assert len(set(alone)) == len(alone)


def test_another_stage_has_other_prefixes() -> None:
    """A stage that finds its prefix cached from the one before is a stage of another workload."""
    asked = workload(shared_prefix={"tokens": 20})
    one, other = firsts(asked, 5, entropy=(0, 1)), firsts(asked, 5, entropy=(0, 2))
    assert not {each.prompt_token_ids[:20] for each in one} & {each.prompt_token_ids[:20] for each in other}


@pytest.mark.parametrize("told", [True, False])
def test_a_turn_repeats_all_that_was_said_and_adds_something(told: bool) -> None:  # noqa: FBT001 - a table's column
    """History grows by what was really generated where the server tells it, else by as many made-up tokens."""
    chat = drawn(workload(chat={"turns": 3, "think_time": "2s"}), 1)[0]
    request = next(chat)
    thoughts = []
    for turn in range(2):
        assert request.has_next_turn
        answer_ids = (7, 7, 7, turn)
        following = chat.send(Answer(num_tokens=4, token_ids=answer_ids if told else ()))
        said = request.prompt_token_ids + (answer_ids if told else ())
        assert following.prompt_token_ids[: len(said)] == said
        assert following.num_shared_tokens == request.num_prompt_tokens + 4
        assert 3 <= following.num_prompt_tokens - following.num_shared_tokens <= 9
        assert len(following.prompt_token_ids) == following.num_prompt_tokens
        thoughts.append(following.think_s)
        request = following
    assert not request.has_next_turn
    assert all(thought > 0 for thought in thoughts)
    with pytest.raises(StopIteration):
        chat.send(Answer(num_tokens=5))


def test_the_order_of_answers_changes_no_prompt() -> None:
    """Two runs of one seed send the same chats though their answers come in another order."""
    asked = workload(chat={"turns": 2})

    def second_turns(order: list[int]) -> dict[int, tuple[int, ...]]:
        chats = drawn(asked, 2)
        for chat in chats:
            next(chat)
        return {number: chats[number].send(Answer(num_tokens=3)).prompt_token_ids for number in order}

    assert second_turns([0, 1]) == second_turns([1, 0])


def test_text_has_the_words_that_make_its_tokens() -> None:
    """Where words are one and a half tokens and the template adds ten, a prompt of a hundred is sixty words."""
    asked = load_workload(
        {"input_len": {"kind": "fixed", "tokens": 100}, "output_len": {"kind": "fixed", "tokens": 5}, "api": "chat"}
    )
    one, other = firsts(asked, 2, text=TextScale(tokens_per_word=1.5, overhead_tokens=10))
    assert [len(message.content.split()) for message in one.messages] == [60]
    assert one.messages != other.messages
    assert (one.num_prompt_tokens, one.prompt_token_ids) == (100, ())


def test_a_chat_by_text_repeats_the_answers_words() -> None:
    """The server sees what it said, as its own."""
    asked = workload(chat={"turns": 2}, api="chat")
    chat = drawn(asked, 1, text=TextScale(tokens_per_word=1.0))[0]
    first = next(chat)
    second = chat.send(Answer(num_tokens=2, text="as said"))
    assert [message.role for message in second.messages] == ["user", "assistant", "user"]
    assert second.messages[0] == first.messages[0]
    assert second.messages[1].content == "as said"


def test_a_trace_keeps_its_pairs_and_shares_its_prefixes(tmp_path: Path) -> None:
    """Lengths that belong together stay together; a prefix that was sent before is no surprise in the cache."""
    rows = [
        {"input_tokens": 10, "output_tokens": 1, "prefix": "a", "prefix_tokens": 6},
        {"input_tokens": 8, "output_tokens": 2, "prefix": "b", "prefix_tokens": 6},
        {"input_tokens": 20, "output_tokens": 3, "prefix": "a", "prefix_tokens": 8},
    ]
    requests = firsts(trace(tmp_path, rows), 4)
    assert [(each.num_prompt_tokens, each.max_tokens) for each in requests] == [(10, 1), (8, 2), (20, 3), (10, 1)]
    assert [each.num_shared_tokens for each in requests] == [0, 0, 6, 6]
    first, _, third, again = (each.prompt_token_ids for each in requests)
    assert first[:6] == third[:6] == again[:6]
    assert first[6:] != again[6:]


SESSION = [
    {"at_s": 0, "input_tokens": 10, "output_tokens": 5, "session": "s"},
    {"at_s": 1, "input_tokens": 4, "output_tokens": 5},
    {"at_s": 2, "input_tokens": 18, "output_tokens": 5, "session": "s"},
]


def test_users_who_wait_chat_as_the_trace_did(tmp_path: Path) -> None:
    """In a closed loop a session is one user's: 18 in are 10, an answer of 5, and 3 more."""
    chat, single = drawn(trace(tmp_path, SESSION), 2)
    first = next(chat)
    second = chat.send(Answer(num_tokens=5, token_ids=(1, 2, 3, 4, 5)))
    assert second.prompt_token_ids[:15] == (*first.prompt_token_ids, 1, 2, 3, 4, 5)
    assert (second.num_prompt_tokens, second.num_shared_tokens, second.has_next_turn) == (18, 15, False)
    assert next(single).num_prompt_tokens == 4


def test_the_clock_waits_for_no_answer(tmp_path: Path) -> None:
    """In a replay a turn leaves at its time, with the same beginning as the one before; and the trace ends."""
    requests = firsts(trace(tmp_path, SESSION, arrivals="trace"), 9)
    assert [each.num_prompt_tokens for each in requests] == [10, 4, 18]
    assert requests[2].prompt_token_ids[:10] == requests[0].prompt_token_ids
    assert [each.num_shared_tokens for each in requests] == [0, 0, 10]


def test_a_trace_leaves_out_what_does_not_fit_and_refuses_to_send_nothing(tmp_path: Path) -> None:
    """What no context holds is not sent; a trace of which nothing is left is an error with both figures."""
    asked = trace(tmp_path, SESSION, arrivals="trace")
    found = conversations(asked, token_ids=range(9), max_model_len=16, entropy=(0,))
    assert [next(each).num_prompt_tokens for each in found] == [10, 4]
    with pytest.raises(WorkloadError, match=r"none of the 3 requests.*max_model_len=5"):
        asked.check_fits(5)


def test_what_is_not_sent_counts_in_no_length(tmp_path: Path) -> None:
    """Memory reckoned with requests that are too long to be sent warns of preemptions that never come."""
    asked = trace(tmp_path, SESSION, arrivals="trace")
    assert asked.longest_request_tokens(16) < asked.longest_request_tokens()
    assert asked.longest_request_tokens(16) <= 16
    assert asked.mean_request_tokens(16) < asked.mean_request_tokens()


def test_lengths_with_what_is_shared_are_known_before() -> None:
    """Memory is reckoned with the prefix and the history, not with a first turn."""
    asked = workload(chat={"turns": 3}, shared_prefix={"tokens": 100, "share": 0.5})
    assert asked.longest_request_tokens() == 100 + 3 * (9 + 5)
    assert asked.mean_request_tokens() == 50 + 2 * (6 + 5)
    with pytest.raises(WorkloadError, match=r"142 tokens \(109 in, 5 out in 3 turns\), above max_model_len=141"):
        asked.check_fits(141)


def test_hashes_of_first_workloads_stay_and_what_is_new_changes_them() -> None:
    """Runs kept from before are still comparable; a workload that sends something else is another."""
    assert load_workload("chat-short").hash == "6053340eae22"
    changes: list[dict[str, Any]] = [
        {"length_correlation": 0.5},
        {"shared_prefix": {"tokens": 5}},
        {"chat": {"turns": 2}},
        {"arrivals": {"kind": "poisson"}},
        {"arrivals": {"kind": "closed", "think_time": "1s"}},
        {"api": "chat"},
    ]
    assert len({workload(**change).hash for change in [{}, *changes]}) == len(changes) + 1
    assert workload(arrivals={"kind": "closed"}, length_correlation=0).hash == workload().hash


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"output_len": LENGTHS["output_len"]}, "'input_len' is missing"),
        ({**LENGTHS, "arrivals": {"kind": "trace"}}, "give one under `trace`"),
        ({**LENGTHS, "arrivals": {"kind": "batch"}, "chat": {"turns": 2}}, "no second turns"),
        ({**LENGTHS, "arrivals": {"kind": "gamma", "burstiness": 0}}, "burstiness"),
        ({**LENGTHS, "length_correlation": 1.5}, "length_correlation"),
    ],
)
def test_a_workload_that_says_two_things_is_refused(data: dict[str, Any], words: str) -> None:
    """Of two things that exclude each other one would silently not be sent."""
    with pytest.raises(InputError, match=words):
        load_workload(data)


def test_a_trace_has_lengths_of_its_own(tmp_path: Path) -> None:
    """Given both, one of them would be ignored."""
    given = trace(tmp_path, SESSION).model_dump(mode="json", exclude_defaults=True)
    with pytest.raises(InputError, match="a trace brings its own input_len"):
        load_workload({**given, "input_len": LENGTHS["input_len"]})
