"""A job's conditions mean what they say, and nothing a job holds is ever run as code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.conditions import ConditionError, Value, parse_condition

NAMES = {"max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "kv_cache_dtype", "max_model_len"}
VALUES: dict[str, Value] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "enable_chunked_prefill": True,
    "kv_cache_dtype": "fp8",
    "max_model_len": None,
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("max_num_batched_tokens >= 4 * max_num_seqs", True),
        ("max_num_batched_tokens >= 64 * max_num_seqs", False),
        ("enable_chunked_prefill or max_num_batched_tokens >= 8192", True),
        ("not enable_chunked_prefill", False),
        ("kv_cache_dtype == 'fp8' and max_num_seqs in [32, 64]", True),
        ("kv_cache_dtype not in ['auto']", True),
        ("1 <= max_num_seqs < 64", False),
        ("enable_chunked_prefill == true and max_model_len == null", True),
        ("-max_num_seqs % 7 + 10 // 3 == 9", True),
    ],
)
def test_a_condition_means_what_it_says(text: str, *, holds: bool) -> None:
    """A space holds what its author wrote, in YAML's or Python's spelling of true."""
    assert parse_condition(text, NAMES).holds(VALUES) is holds


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "max_num_seqs.bit_length() > 1",
        "[x for x in [1]] == [1]",
        "(lambda: True)()",
        "max_num_seqs ** 9 ** 9 ** 9 > 1",
        "max_num_seqs if true else 1",
        "f'{max_num_seqs}' == '64'",
        "max_num_seqs[0] == 1",
        "1 << max_num_seqs > 1",
        "max_seqs > 1",
        "b'x' == b'x'",
        "max_num_seqs >",
        "",
        "(" * 400,
        "1 + " * 200,
    ],
)
def test_what_is_not_of_the_language_is_refused_when_the_job_is_read(text: str) -> None:
    """No job file runs code, and a typo is found before an engine is launched."""
    with pytest.raises(ConditionError):
        parse_condition(text, NAMES)


@pytest.mark.parametrize(
    "text", ["max_num_seqs", "kv_cache_dtype > 1", "1 / (max_num_seqs - 64) > 1", "not max_num_seqs", "1 in 2"]
)
def test_what_cannot_be_judged_is_an_error_not_a_guess(text: str) -> None:
    """A number is not a truth, a text has no size."""
    with pytest.raises(ConditionError):
        parse_condition(text, NAMES).holds(VALUES)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Whatever stands in the file, the answer is a truth or a clear error."""
    try:
        result = parse_condition(text, NAMES).holds(VALUES)
    except ConditionError:
        return
    assert isinstance(result, bool)
