"""An engine that is only data: what a definition may say, what it must, and how a mistake in it is named."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from tuner.engines.adapter import check_job
from tuner.engines.definition import EngineDefinition, Place, filled
from tuner.engines.registry import adapter_of
from tuner.inputs import InputError, read_preset, validated
from tuner.job import TuningJob, load_job
from tuner.records import FailureKind

LLAMA = read_preset("engines", "llama-cpp")
SPACE: dict[str, object] = {
    "why": "slots and batch",
    "parameters": {
        "max_num_seqs": {"choices": [4, 64], "why": "slots"},
        "max_num_batched_tokens": {"choices": [128, 1024], "why": "batch"},
    },
    "cautious_start": {"max_num_seqs": 4, "max_num_batched_tokens": 128},
}


def _changed(**changes: object) -> dict[str, object]:
    """The llama.cpp preset with keys replaced; None takes one out. `a__b` is a key below another."""
    data = copy.deepcopy(LLAMA)
    assert isinstance(data, dict)
    for path, value in changes.items():
        *above, last = path.split("__")
        key = int(last) if last.isdecimal() else last
        place = data
        for name in above:
            place = place[name]
        if value is None:
            del place[key]
        else:
            place[key] = value
    return data


def llama_job(*, executable: str = "true", fixed: dict[str, object] | None = None, **over: object) -> TuningJob:
    """A job on llama.cpp's server."""
    engine = {
        "name": "command",
        "definition": "llama-cpp",
        "command": [executable],
        "device_memory": None,
        "cpus": None,
        "fixed": {"max_model_len": 1024} if fixed is None else fixed,
    }
    return load_job("embedded", {"engine": engine, "search_space": SPACE, **over})


def test_the_preset_starts_llama_cpp_with_every_parameter_explicit() -> None:
    """A flag that is left out is llama.cpp's default in force, under the name of another setting."""
    job = llama_job(executable="/opt/llama-server")
    config = job.config(job.search_space.cautious_start)
    command = adapter_of(job.engine).command("m.gguf", config, job.engine, port=8123, served_model_name="ours")
    assert command[:3] == ["/opt/llama-server", "--model", "m.gguf"]
    told = " ".join(command)
    for flags in (
        *("--host 127.0.0.1", "--port 8123", "--alias ours", "--parallel 4", "--batch-size 128"),
        *("--kv-unified-per-slot 1024", "--no-cache-prompt --cache-ram 0"),
    ):
        assert flags in told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"arguments": ["--model", "{model}"]}, "{port} is missing"),
        ({"arguments": ["{model}", "{port}", "{served_model_name}", "{modle}"]}, "{modle} stands for nothing here"),
        ({"parameters__max_num_seqs": ["--parallel"]}, "{value} is missing"),
        ({"parameters__max_num_sequences": ["-n", "{value}"]}, "did you mean 'max_num_seqs'"),
        ({"parameters__enable_prefix_caching": None}, "parameters.enable_prefix_caching is missing"),
        ({"read_back__max_model_len": None}, "read_back.max_model_len is missing"),
        ({"read_back__max_num_seqs": None}, "max_num_seqs is set but never checked"),
        ({"read_back__max_num_seqs": {"page": "/props", "log": "(x)"}}, "either page and at, or log"),
        ({"read_back__max_num_seqs": {"log": "slots"}}, "needs one group"),
        ({"read_back__max_num_seqs": {"log": "("}}, "no regular expression"),
        ({"read_back__watermark": {"log": "(x)"}}, "watermark is read back or required, but"),
        ({"metrics": {}}, "metric of mean_running"),
        ({"metrics__preemptions": ["x:preempted"]}, "metric of num_preemptions"),
        ({"not_applicable__0": "num_preemtions"}, "did you mean 'num_preemptions'"),
        ({"failures": [{"line": "boom", "kind": "out_of_luck"}]}, "failures.0.kind"),
    ],
)
def test_a_mistake_in_a_definition_is_named(changes: dict[str, object], told: str) -> None:
    """Whoever adds an engine has nothing but these words: a silent gap would be a wrong number later."""
    with pytest.raises(InputError) as error:
        validated(EngineDefinition, _changed(**changes), where="mine.yaml")
    assert told in str(error.value)


def test_braces_that_are_no_place_stay() -> None:
    """An argument may be JSON, and a model's name may hold braces: what is filled in is not looked through again."""
    arguments = ('{"temperature": 0}', "{model}", "a{value}b")
    assert filled(arguments, {"model": "{port}", "value": "1"}) == ('{"temperature": 0}', "{port}", "a1b")


def test_what_the_engine_cannot_be_told_is_refused_before_a_launch() -> None:
    """A setting that never reached the engine would be searched, and recommended, for nothing."""
    job = llama_job(fixed={"max_model_len": 1024, "watermark": 0.1})
    with pytest.raises(InputError, match=r"the engine llama-cpp cannot be told engine\.fixed\.watermark"):
        check_job(adapter_of(job.engine), job)
    with pytest.raises(InputError, match="llama-cpp cannot be told kv_cache_dtype=fp8: it takes auto, f16"):
        _installed(llama_job(fixed={"max_model_len": 1024, "kv_cache_dtype": "fp8"}))
    with pytest.raises(InputError, match="max_model_len is missing: the engine llama-cpp must be told one"):
        _installed(llama_job(fixed={}))
    with pytest.raises(InputError, match="needs no-such-server, which is not there"):
        _installed(llama_job(executable="no-such-server"))
    _installed(llama_job())


def _installed(job: TuningJob) -> None:
    adapter_of(job.engine).installed(job)


def test_a_definition_lies_beside_its_job(tmp_path: Path) -> None:
    """A job and its engine's file move together, and the run keeps all of it: a resume needs no file of elsewhere."""
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(_changed(name="mine")))
    engine = {"name": "command", "definition": "mine.yaml", "fixed": {"max_model_len": 1024}}
    job = llama_job().model_dump(mode="json", exclude={"engine"}, exclude_none=True)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**job, "engine": engine}))
    read = load_job(str(tmp_path / "job.yaml"))
    assert adapter_of(read.engine).name == "mine"
    assert TuningJob.model_validate(read.model_dump(mode="json")) == read


@pytest.mark.parametrize("engine", [{"name": "command"}, {"name": "vllm", "definition": "llama-cpp"}])
def test_only_an_engine_without_code_has_a_definition(engine: dict[str, object]) -> None:
    """One that is ignored would have somebody measure another engine than theirs."""
    with pytest.raises(InputError, match="an engine without code here is `name: command`"):
        load_job("embedded", {"engine": {"device_memory": None, "cpus": None, **engine}})


@pytest.mark.parametrize(
    ("log", "kind", "told"),
    [
        ("E srv start: couldn't bind HTTP server socket, port: 1\nI srv cleaning up", "infrastructure", "bind"),
        ("E failed to initialize the context: n_seq_max must be <= 256\nE exiting", "invalid_config", "<= 256"),
        ("E gguf_init: failed to open GGUF file 'm' (No such file)\nE exiting", "invalid_config", "GGUF file 'm'"),
        ("error: invalid argument: --no-such\n", "invalid_config", "--no-such"),
        ("I loading\n", "crashed", "exit code 1 and gave no reason"),
    ],
)
def test_why_an_engine_ended_is_told_by_its_own_line(log: str, kind: str, told: str, tmp_path: Path) -> None:
    """The last line of llama.cpp's log says only that it exits; lines as its server wrote them."""
    file = tmp_path / "engine.log"
    file.write_text(log)
    failed = adapter_of(llama_job().engine).last_words(file, was_ready=False, exit_code=1)
    assert failed.kind is FailureKind(kind)
    assert told in failed.detail


def test_a_value_is_read_where_the_definition_says() -> None:
    """A place is a page or the log, and never both, so that it is clear which one counts."""
    assert Place(page="/props", at=("slots", 0, "n_ctx")).at == ("slots", 0, "n_ctx")
    with pytest.raises(ValueError, match="needs `at`"):
        Place(page="/props")
