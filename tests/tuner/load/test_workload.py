"""What is sent is what the workload says, and no prompt comes twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.inputs import InputError
from tuner.load.prompts import PromptRequest, conversations
from tuner.load.workload import Workload, WorkloadError, load_workload

SMALL = {"input_len": {"kind": "uniform", "low": 3, "high": 9}, "output_len": {"kind": "fixed", "tokens": 5}}


def requests(
    workload: Workload, *, token_ids: range, max_model_len: int, entropy: tuple[int, ...]
) -> Iterator[PromptRequest]:
    """The first request of each conversation."""
    found = conversations(workload, token_ids=token_ids, max_model_len=max_model_len, entropy=entropy)
    return (next(each) for each in found)


def draw(workload: Workload, count: int, entropy: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The first prompts of a sequence."""
    found = requests(workload, token_ids=range(10, 200), max_model_len=10**6, entropy=entropy)
    return [request.prompt_token_ids for request in islice(found, count)]


@pytest.mark.parametrize(
    "name", ["chat-short", "long-prompts", "chat", "summarise", "chat-turns", "shared-system-prompt"]
)
def test_every_preset_loads_and_says_why(name: str) -> None:
    """A preset that cannot be read, or gives no reason, is no use to who has to choose one."""
    workload = load_workload(name)
    assert workload.name == name
    assert len(workload.why) > 20


@pytest.mark.parametrize("more", ["", ', "prefix": "system", "prefix_tokens": 4', ', "session": "s"'])
def test_a_workload_knows_whether_its_prompts_share_beginnings(tmp_path: Path, more: str) -> None:
    """Where they do, a prefix cache is emptied before each stage; where they do not, the server is left alone."""
    line = f'{{"input_tokens": 9, "output_tokens": 2{more}}}\n'
    (tmp_path / "trace.jsonl").write_text(line, encoding="utf-8")
    traced = load_workload({"trace": {"path": str(tmp_path / "trace.jsonl"), "format": "jsonl"}})

    assert traced.shares_prefixes is bool(more)
    assert load_workload(SMALL | {"chat": {"turns": 2}}).shares_prefixes
    assert load_workload(SMALL | {"shared_prefix": {"tokens": 9}}).shares_prefixes
    assert not load_workload(SMALL).shares_prefixes


def test_a_trace_that_was_kept_is_read_back(tmp_path: Path) -> None:
    """`bench.json` holds every field: a replay whose answer cannot be read again has no report and no knee."""
    (tmp_path / "trace.jsonl").write_text('{"input_tokens": 9, "output_tokens": 2}\n', encoding="utf-8")
    traced = load_workload({"trace": {"path": str(tmp_path / "trace.jsonl"), "format": "jsonl"}})

    assert Workload.model_validate_json(traced.model_dump_json()) == traced


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 40), st.integers(1, 40))
def test_lengths_and_ids_stay_in_their_ranges(seed: int, low: int, spread: int, tokens: int) -> None:
    """An off-by-one length or a special token would make the engine do other work than the workload names."""
    lengths = {"kind": "uniform", "low": low, "high": low + spread}
    workload = load_workload({"input_len": lengths, "output_len": {"kind": "fixed", "tokens": tokens}})
    for request in islice(requests(workload, token_ids=range(10, 200), max_model_len=10**6, entropy=(seed,)), 20):
        assert low <= len(request.prompt_token_ids) <= low + spread
        assert all(10 <= token < 200 for token in request.prompt_token_ids)
        assert request.max_tokens == tokens


def test_both_ends_of_a_uniform_length_are_drawn() -> None:
    """A range that never reaches its upper end would pass `max_model_len` checks it was not made for."""
    lengths = {len(ids) for ids in draw(load_workload(SMALL), 200, (1,))}
    assert lengths == set(range(3, 10))


def test_no_two_stages_of_a_study_share_a_first_block() -> None:
    """Prompts seen before are answered from the prefix cache: throughput doubles and nothing was measured."""
    chat = load_workload("chat-short")
    blocks = [
        ids[:16]
        for trial in range(2)
        for stage in range(5)
        for repeat in range(3)
        for ids in draw(chat, 20, (0, trial, stage, repeat))
    ]
    assert len(set(blocks)) == len(blocks)


def test_the_same_entropy_replays_the_same_prompts() -> None:
    """Seed 0 is a seed like any other: two runs of it send the same load."""
    chat = load_workload("chat-short")
    assert draw(chat, 5, (0, 0, 0, 0)) == draw(chat, 5, (0, 0, 0, 0))
    assert draw(chat, 5, (0, 0, 0, 0)) != draw(chat, 5, (0, 0, 0, 1))


def test_the_hash_is_of_what_is_sent() -> None:
    """Stages are compared by it: prose must not change it, and a sampling parameter must."""
    base = load_workload(SMALL)
    assert load_workload({**SMALL, "name": "other", "why": "another reason"}).hash == base.hash
    assert load_workload({**SMALL, "temperature": 0.5}).hash != base.hash
    assert load_workload({**SMALL, "ignore_eos": False}).hash != base.hash


def test_an_unknown_preset_names_the_nearest_and_all() -> None:
    """A typo is answered with the word that was meant."""
    with pytest.raises(InputError, match=r"'chat-shrt'.*did you mean 'chat-short'.*summarise"):
        load_workload("chat-shrt")


def test_an_unknown_key_names_the_nearest() -> None:
    """A mistyped key must not silently send another workload."""
    with pytest.raises(InputError, match=r"'temprature'.*did you mean 'temperature'"):
        load_workload({**SMALL, "temprature": 1.0})
    with pytest.raises(InputError, match="tokns"):
        load_workload({**SMALL, "output_len": {"kind": "fixed", "tokns": 3}})
    with pytest.raises(InputError, match=r"low=9 is above high=3"):
        load_workload({**SMALL, "input_len": {"kind": "uniform", "low": 9, "high": 3}})


def test_a_workload_longer_than_the_model_is_refused_before_anything_is_sent() -> None:
    """Otherwise every request fails, one by one, for the length of a stage."""
    with pytest.raises(WorkloadError, match=r"4224 tokens.*max_model_len=4223"):
        requests(load_workload("summarise"), token_ids=range(256), max_model_len=4223, entropy=(0,))
    requests(load_workload("summarise"), token_ids=range(256), max_model_len=4224, entropy=(0,))


def test_trials_of_one_study_get_the_same_lengths_and_different_prompts() -> None:
    """Two settings are told apart by what they do, not by one of them having drawn the shorter requests."""
    workload = load_workload("chat-short")

    def drawn(entropy: tuple[int, ...]) -> list[PromptRequest]:
        return list(islice(requests(workload, token_ids=range(256), max_model_len=2048, entropy=entropy), 50))

    one, other, next_study = drawn((0, 1, 2)), drawn((0, 5, 3)), drawn((1, 1, 2))
    lengths = [[(len(each.prompt_token_ids), each.max_tokens) for each in some] for some in (one, other, next_study)]
    assert lengths[0] == lengths[1] != lengths[2]
    assert not {each.prompt_token_ids[:16] for each in one} & {each.prompt_token_ids[:16] for each in other}
