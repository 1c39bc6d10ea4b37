"""A trace is read as it was published; a row that is none is told with its place, and never guessed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.inputs import InputError, validated
from tuner.load.trace_formats import TraceError
from tuner.load.traces import Trace, TraceSpec, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2024-01-31 23:59:59.5000001,300,10\r
2024-02-01 00:00:00.7500000,20,4000\r
2024-02-01 00:00:01.5000000,7,1"""

BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
10,7,3,ChatGPT,100,20,120,Conversation log
12,,3,GPT-4,50,0,50,API log
15,7,3,ChatGPT,150,30,180,Conversation log
"""

MOONCAKE = """{"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 600, "output_length": 9, "hash_ids": [0, 3]}
"""

SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 17}]},
    {
        "id": "b",
        "conversations": [
            {"from": "gpt", "value": "opened by the machine"},
            {"from": "human", "value": "12345678"},
            {"from": "gpt", "value": "1234"},
            {"from": "human", "value": "12345678"},
            {"from": "gpt", "value": "12345678"},
        ],
    },
]

OWN = """{"at_s": 1.0, "input_tokens": 9, "output_tokens": 2, "prefix": "system", "prefix_tokens": 4, "session": "s"}

{"at_s": 0.5, "input_tokens": 3, "output_tokens": 1}
"""


def read(folder: Path, text: str, kind: str, **options: Any) -> Trace:
    """A trace from a file of this content."""
    path = folder / f"trace-{kind}"
    path.write_bytes(text.encode())
    return read_trace(TraceSpec.model_validate({"path": str(path), "format": kind, **options}))


def lengths(trace: Trace) -> list[tuple[float | None, int, int]]:
    """(time, in, out) of each row."""
    return [
        (None if row.at_s is None else round(row.at_s, 6), row.input_tokens, row.output_tokens) for row in trace.rows
    ]


def test_azure_dates_become_seconds(tmp_path: Path) -> None:
    """Seven decimals, carriage returns and a last line without an end are how it is published."""
    assert lengths(read(tmp_path, AZURE, "azure")) == [(0.0, 300, 10), (1.25, 20, 4000), (2.0, 7, 1)]


def test_burstgpt_leaves_failures_out_and_keeps_chats_together(tmp_path: Path) -> None:
    """An answer of no tokens had failed in the original; a turn begins with what was said before."""
    trace = read(tmp_path, BURSTGPT, "burstgpt")
    assert lengths(trace) == [(0.0, 100, 20), (5.0, 150, 30)]
    assert trace.num_left_out == 1
    assert [row.segments for row in trace.rows] == [(("session 7", 100),), (("session 7", 150),)]


def test_mooncake_blocks_are_shared_beginnings(tmp_path: Path) -> None:
    """Hash 0 stands for the same 512 tokens wherever it stands; the last block ends with the prompt."""
    trace = read(tmp_path, MOONCAKE, "mooncake")
    assert lengths(trace) == [(0.0, 1100, 5), (2.0, 600, 9)]
    assert trace.rows[0].segments == (("block 0", 512), ("block 1", 512), ("block 2", 76))
    assert trace.rows[1].segments == (("block 0", 512), ("block 3", 88))


def test_sharegpt_answers_follow_all_that_was_said(tmp_path: Path) -> None:
    """Characters over four where no tokenizer is given, and said so; nobody asked for the machine's opening."""
    trace = read(tmp_path, json.dumps(SHAREGPT), "sharegpt")
    assert lengths(trace) == [(None, 10, 5), (None, 8, 1), (None, 11, 2)]
    assert trace.lengths_estimated
    assert trace.times_s is None


def test_sharegpt_is_counted_by_a_tokenizer_where_there_is_one(tmp_path: Path) -> None:
    """The embedded model's tokens are bytes."""
    tokenizer = Path(__file__).parents[3] / "engine/models/embedded/tokenizer.json"
    trace = read(tmp_path, json.dumps(SHAREGPT), "sharegpt", tokenizer=str(tokenizer))
    assert lengths(trace)[0] == (None, 40, 17)
    assert not trace.lengths_estimated


def test_our_own_lines_are_sorted_by_time(tmp_path: Path) -> None:
    """A log written as answers ended is not in order of arrival."""
    trace = read(tmp_path, OWN, "jsonl")
    assert lengths(trace) == [(0.0, 3, 1), (0.5, 9, 2)]
    assert trace.rows[1].segments == (("prefix system", 4), ("session s", 5))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("azure", AZURE.replace("4000", "many"), r"line 3: GeneratedTokens is 'many'.*whole number"),
        ("azure", AZURE.replace("300", "0"), r"line 2: ContextTokens is '0'"),
        ("azure", AZURE.replace("2024-02-01 00:00:00.75", "yesterday"), r"line 3: TIMESTAMP is 'yesterday"),
        ("azure", AZURE.replace("7,1", "7"), r"line 4: row is"),
        ("azure", AZURE.replace("ContextTokens", "Tokens"), r"line 1: the header.*lacks ContextTokens"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request is left of 0 rows"),
        ("burstgpt", BURSTGPT.replace("15,7", "nan,7"), r"line 4: Timestamp is 'nan'"),
        ("burstgpt", BURSTGPT.replace("100", "10.5"), r"line 2: Request tokens is '10.5'"),
        ("mooncake", MOONCAKE.replace("[0, 3]", '"0"'), r"line 2: hash_ids is '0'"),
        ("mooncake", MOONCAKE + "{", r"line 3: line is '\{'.*JSON object"),
        ("mooncake", MOONCAKE.replace('"output_length": 9, ', ""), r"line 2: output_length is None"),
        ("sharegpt", "{}", "a list of chats"),
        ("sharegpt", '[{"id": "x"}]', r"chat 0: chat is"),
        ("sharegpt", '[{"conversations": [{"from": "human"}]}]', r"chat 0: turn is"),
        ("jsonl", OWN.replace('"output_tokens": 1', '"output_tokens": 0'), r"line 3: output_tokens is 0"),
        ("jsonl", OWN.replace('"at_s": 0.5', '"at": 0.5'), r"line 3: at is 0.5"),
        ("jsonl", OWN.replace(', "prefix_tokens": 4', ""), r"line 1: .*prefix.*go together"),
    ],
)
def test_a_bad_row_is_told_with_file_line_and_value(tmp_path: Path, kind: str, text: str, words: str) -> None:
    """A row that is skipped in silence is load that was never sent."""
    with pytest.raises(TraceError, match=words) as told:
        read(tmp_path, text, kind)
    assert f"trace-{kind}" in str(told.value)


@given(st.sampled_from(["azure", "burstgpt", "mooncake", "sharegpt", "jsonl"]), st.binary(max_size=200))
def test_rubbish_is_an_error_and_never_a_crash(tmp_path_factory: Any, kind: str, rubbish: bytes) -> None:
    """Whatever file a user points at, the answer is a sentence."""
    path = tmp_path_factory.mktemp("rubbish") / "trace"
    path.write_bytes(rubbish)
    with pytest.raises(TraceError):
        read_trace(TraceSpec.model_validate({"path": str(path), "format": kind}))


def test_a_sample_keeps_the_pattern_and_whole_chats(tmp_path: Path) -> None:
    """A tenth of the requests is a tenth in every hour; half a chat is no chat."""
    rows = [{"at_s": i / 10, "input_tokens": 5, "output_tokens": 1} for i in range(10_000)]
    for i, row in enumerate(rows):
        if i % 2:
            row["session"] = str(i // 200)
    text = "\n".join(map(json.dumps, rows))
    trace = read(tmp_path, text, "jsonl", sample=0.3)
    alone = [row for row in trace.rows if row.session is None]
    halves = [sum(row.at_s < 500 for row in alone), sum(row.at_s >= 500 for row in alone)]  # type: ignore[operator]
    assert halves == pytest.approx([750, 750], rel=0.1)
    chats = Counter(row.session for row in trace.rows if row.session is not None)
    assert set(chats.values()) == {100}
    assert trace == read(tmp_path, text, "jsonl", sample=0.3)
    assert trace != read(tmp_path, text, "jsonl", sample=0.3, sample_seed=1)


def test_duration_is_the_traces_own_and_scale_comes_after(tmp_path: Path) -> None:
    """The first second and a half of it, played ten times as slowly."""
    trace = read(tmp_path, AZURE, "azure", duration="1.5s", time_scale=10)
    assert lengths(trace) == [(0.0, 300, 10), (12.5, 20, 4000)]


def test_what_no_context_holds_is_left_out_and_counted(tmp_path: Path) -> None:
    """Requests the engine must refuse are not its failures, and not silently fewer."""
    trace = read(tmp_path, AZURE, "azure").fitting(310)
    assert lengths(trace) == [(0.0, 300, 10), (2.0, 7, 1)]
    assert trace.num_left_out == 1


def test_a_trace_that_changed_is_another_one(tmp_path: Path) -> None:
    """A run that is gone on with must not go on with other requests."""
    path = tmp_path / "trace"
    path.write_text(AZURE)
    spec = TraceSpec.model_validate({"path": str(path), "format": "azure"})
    path.write_text(AZURE.replace("300", "301"))
    with pytest.raises(TraceError, match=rf"has changed: its digest was {spec.digest}"):
        read_trace(spec)


def test_a_trace_that_is_not_there_is_told_when_the_job_is_read(tmp_path: Path) -> None:
    """Not when the engine has been launched for it."""
    with pytest.raises(InputError, match=r"there is no trace at .*gone.csv"):
        validated(TraceSpec, {"path": str(tmp_path / "gone.csv"), "format": "azure"}, where="trace")
