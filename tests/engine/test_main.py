"""The command line and the config file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.__main__ import build_parsers, engine_config, main, parse_arguments
from engine.config import ConfigError, EngineConfig
from tests.fakes.serving import ROOT


def config_of(*argv: str) -> EngineConfig:
    """The config that a command line asks for."""
    return engine_config(parse_arguments(["serve", *argv]))


def write(folder: Path, text: str) -> str:
    """A config file."""
    path = folder / "engine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flags_bear_vllms_names_and_sizes() -> None:
    """A command line written for vLLM says the same here."""
    config = config_of(
        *("embedded", "--max-num-seqs", "16", "--max-num-batched-tokens", "16k", "--gpu-memory-utilization", "0.5"),
        *(
            "--max-model-len",
            "2K",
            "--no-enable-chunked-prefill",
            "--no-enable-prefix-caching",
            "--device-memory",
            "1G",
        ),
    )
    asked = EngineConfig(
        model="embedded",
        max_num_seqs=16,
        max_num_batched_tokens=16_000,
        gpu_memory_utilization=0.5,
        max_model_len=2048,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        device_memory_bytes=2**30,
    )
    assert config == asked
    assert config_of("embedded") == EngineConfig(model="embedded")


def test_a_file_sets_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    """Keys with dashes or underscores; an exported profile can be overridden by hand."""
    path = write(tmp_path, "model: embedded\nmax_num_seqs: 32\nmax-num-batched-tokens: 4K\nseed: 7\n")
    config = config_of("--config", path, "--max-num-seqs", "8")
    assert (config.model, config.max_num_seqs, config.max_num_batched_tokens, config.seed) == ("embedded", 8, 4096, 7)
    assert config_of("other", "--config", path).model == "other"


@pytest.mark.parametrize(
    ("line", "is_on"),
    [
        ("no-enable-chunked-prefill: true", False),
        ("no_enable_chunked_prefill: false", True),
        ("enable-chunked-prefill: false", False),
        ("enable_chunked_prefill: true", True),
    ],
)
def test_true_and_false_are_honoured_in_a_file(tmp_path: Path, line: str, is_on: bool) -> None:  # noqa: FBT001 - a case
    """Writing false turns a feature off, in every spelling."""
    assert config_of("embedded", "--config", write(tmp_path, line)).enable_chunked_prefill is is_on


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_seq: 4", ["max_num_seq", "max-num-seqs"]),
        ("max-num-seqs: null", ["max-num-seqs"]),
        ("max-num-seqs: true", ["max-num-seqs"]),
        ("enable-chunked-prefill: 1", ["enable-chunked-prefill", "true or false"]),
        ("- a\n- b", ["list"]),
        ("a: [", ["cannot be read"]),
        ("max-num-seqs: 12x", ["max-num-seqs", "12x", "16k"]),
        ("gpu-memory-utilization: most", ["gpu-memory-utilization", "most"]),
        ("port: 80.5", ["port", "80.5"]),
        ("port: -1", ["port", "-1", "65535"]),
        ("port: 80\nseed: 2001-13-45", ["cannot be read", "line 2", "2001-13-45", "mend it"]),
        ("seed: !!timestamp x", ["cannot be read", "line 1", "'x'", "mend it"]),
        ("seed: !!bool x", ["cannot be read", "line 1", "'x'", "mend it"]),
        ("seed: !!int ''", ["cannot be read", "line 1", "mend it"]),
        ("seed: " + "1" * 5000, ["cannot be read", "line 1", "mend it"]),
        ("seed: " + "[" * 3000, ["cannot be read", "nested", "flatten"]),
        ("seed: \0", ["cannot be read", "plain UTF-8"]),
        ("seed: 1\nport: 80\nseed: 2", ["'seed' stands twice", "line 3"]),
        ("max-num-seqs: 1\nmax_num_seqs: 2", ["max-num-seqs", "max_num_seqs", "set the same"]),
        ("enable-prefix-caching: true\nno-enable-prefix-caching: true", ["enable-prefix-caching", "set the same"]),
        ('host: "a\\0b"', ["host", "NUL"]),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_key(tmp_path: Path, text: str, words: list[str]) -> None:
    """The message names the key and the nearest known one, and nothing is ignored."""
    with pytest.raises(ConfigError) as refused:
        config_of("embedded", "--config", write(tmp_path, text))
    assert all(word in str(refused.value) for word in words)


def test_every_field_of_the_config_has_a_flag() -> None:
    """No knob of the engine is out of reach of a deployment file."""
    _, parser = build_parsers()
    flags = {action.dest for action in parser._actions if action.option_strings}
    assert set(EngineConfig.__dataclass_fields__) - {"model"} <= flags


def test_two_models_are_refused() -> None:
    """Nobody measures another model than the one that was meant; a file's model gives way as every key of it does."""
    with pytest.raises(ConfigError, match="'embedded' and --model 'other': leave one out"):
        config_of("embedded", "--model", "other")
    assert config_of("embedded", "--model", "embedded").model == "embedded"


def test_what_needs_no_model_is_refused_before_anything_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    """One JSON line with both values, exit code 1."""
    assert main(["serve", "embedded", "--max-num-seqs", "16", "--max-num-batched-tokens", "8"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["event"], event["kind"]) == ("start_failed", "invalid_config")
    assert "=8 " in event["message"]
    assert "=16:" in event["message"]


def test_a_mistake_in_a_file_leaves_the_decisive_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A program that starts the engine from an exported file reads why it did not start."""
    assert main(["serve", "embedded", "--config", write(tmp_path, "max-num-batched-tokens: 2.5K")]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["event"], event["kind"]) == ("start_failed", "invalid_config")
    assert "2.5K" in event["message"]


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_is_none_is_refused(port: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The message names the flag, the value and the range, instead of a trace from the socket."""
    with pytest.raises(SystemExit):
        parse_arguments(["serve", "embedded", f"--port={port}"])
    error = capfd.readouterr().err
    assert all(word in error for word in ("--port", port, "0 to 65535"))


@pytest.mark.parametrize(("argv", "code"), [(["serve", "m", "--no-such-flag"], 2), (["--help"], 0), ([], 2)])
def test_unknown_flags_end_with_2(argv: list[str], code: int) -> None:
    """As vLLM and every argparse program do."""
    command = [sys.executable, "-m", "engine", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code
    assert "usage: python -m engine" in done.stdout + done.stderr
