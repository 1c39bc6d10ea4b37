"""What a user hands in is understood exactly, or refused in words that help."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from tuner.inputs import InputError, parse_duration_s, parse_size_bytes, parse_token_count, read_preset, validated
from tuner.job import TuningJob, load_job


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("30s", 30.0), ("10m", 600.0), ("1.5h", 5400.0)])
def test_durations_with_a_unit(text: str, seconds: float) -> None:
    """A limit means what its unit says."""
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("500", "without a unit"),
        (500, "without a unit"),
        (0.5, "without a unit"),
        ("", "not a duration"),
        ("5 parsecs", "not a duration"),
        ("-1s", "below zero"),
        (None, "not a duration"),
        ("1e3s", "not a duration"),
        ("inf", "not a finite time"),
        ("nans", "not a finite time"),
    ],
)
def test_a_bare_number_is_no_duration(text: object, fault: str) -> None:
    """Seconds and milliseconds are never confused: no unit is guessed, the fault is named, and what would do."""
    with pytest.raises(ValueError, match=f"{fault}.*: write digits and a unit"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("text", "size"), [("256M", 268435456), ("1G", 2**30), ("512", 512), (77, 77), ("4KiB", 4096), ("1GiB", 2**30)]
)
def test_sizes(text: object, size: int) -> None:
    """A device size means binary units."""
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["256X", "1.5G", "128MB", True, "", None, "-1"])
def test_no_size(text: object) -> None:
    """Nothing but a size is taken for one."""
    with pytest.raises(ValueError, match="size"):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("text", "count"), [("16k", 16000), ("16K", 16384), ("25.6k", 25600), ("1m", 10**6), (2048, 2048), ("7", 7)]
)
def test_token_counts_as_vllm_reads_them(text: object, count: int) -> None:
    """A length means the same in a job and on vLLM's command line."""
    assert parse_token_count(text) == count


@pytest.mark.parametrize("text", ["25.6K", "16 K", "1.5", "1.0005k", "k", "", True, None, "16kk", 16.5])
def test_no_token_count(text: object) -> None:
    """A suffix that could mean two things is refused."""
    with pytest.raises(ValueError, match="number of tokens"):
        parse_token_count(text)


def _job_data() -> dict[str, object]:
    data = read_preset("jobs", "embedded")
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize(
    ("place", "key", "meant"),
    [
        ((), "wrokload", "workload"),
        (("budget",), "trails", "trials"),
        (("engine", "fixed"), "max_modell_len", "max_model_len"),
        (("slo",), "ttft_p59", "ttft_p95"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(place: tuple[str, ...], key: str, meant: str) -> None:
    """A mistyped key tunes nothing in silence, wherever it stands."""
    data = _job_data()
    spot = data
    for part in place:
        below = spot.setdefault(part, {})
        assert isinstance(below, dict)
        spot = below
    spot[key] = 1
    with pytest.raises(InputError) as caught:
        validated(TuningJob, data, where="job.yaml")
    assert key in str(caught.value)
    assert f"did you mean {meant!r}" in str(caught.value)


def test_every_fault_is_reported_at_once() -> None:
    """One round of mending is enough."""
    data = _job_data() | {"seed": -1, "max_load": 0, "slo": {"ttft_p95": "500", "itl_p95": "0ms"}}
    with pytest.raises(InputError) as caught:
        validated(TuningJob, data, where="job.yaml")
    text = str(caught.value)
    assert len(text.splitlines()) == 4
    for part in ("seed", "-1", "max_load", "slo.ttft_p95", "'500'", "above zero"):
        assert part in text


def test_an_unknown_preset_names_the_nearest() -> None:
    """A mistyped preset is a question of seconds."""
    with pytest.raises(InputError, match="did you mean 'embedded'"):
        load_job("embeded")


@pytest.mark.parametrize("text", ["[1, 2", "- a\n- b", "just words", "\x00"])
def test_a_file_that_is_no_job_is_refused_by_name(tmp_path, text: str) -> None:  # type: ignore[no-untyped-def]
    """Any file may be handed in; what is not a job says so and names itself."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"job\.yaml"):
        load_job(str(path))


def test_options_replace_single_keys_of_the_file() -> None:
    """`--trials` leaves the file's time budget alone."""
    job = load_job("embedded", {"budget": {"trials": 4}, "name": "quick"})
    assert (job.name, job.budget.trials, job.budget.time) == ("quick", 4, load_job("embedded").budget.time)


def test_a_resolved_job_reads_back_as_itself() -> None:
    """The job.yaml of a run is the job that ran."""
    job = load_job("embedded")
    assert TuningJob.model_validate(job.model_dump(mode="json")) == job


def test_the_hint_fits_the_kind_that_was_chosen() -> None:
    """A key of another kind of length is not offered: only what this kind takes."""
    data = _job_data() | {
        "burst": {"input_len": {"kind": "fixed", "tokns": 3}, "output_len": {"kind": "fixed", "tokens": 3}}
    }
    with pytest.raises(InputError, match=r"did you mean 'tokens'\? Known: kind, tokens$"):
        validated(TuningJob, data, where="job.yaml")


def test_lists_and_nested_models_are_searched_for_known_keys() -> None:
    """The hint also works inside lists of models."""

    class Inner(BaseModel, extra="forbid"):
        colour: str

    class Outer(BaseModel, extra="forbid"):
        items: list[Inner]

    with pytest.raises(InputError, match="did you mean 'colour'"):
        validated(Outer, {"items": [{"color": "red"}]}, where="x")
