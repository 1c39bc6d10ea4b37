"""The engine's command line: `python -m engine serve MODEL --max-num-seqs 64 …`, with vLLM's flag names.

`python -m engine plan` takes the same flags and says what such a start would do with the memory.
`python -m engine holders` says which engines hold a CPU's device now.
`python -m engine replay FILE` holds the scheduler against recorded decisions of vLLM's.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from engine.config import ConfigError, EngineConfig, parse_size
from engine.core import CoreFailed, start_error_kind
from engine.device_ledger import DeviceLedgerError
from engine.executor.law import law_names
from engine.holders import holders
from engine.kv_quality import kv_quality
from engine.launch import report_start_failure, serve
from engine.plan import plan
from engine.replay import TraceFileError, read_traces, replay_file
from engine.step_log import COLUMNS
from engine.yaml_file import read_mapping

_DEFAULT = " (default: %(default)s)"
_MAX_PORT = 65535
_BAD_INPUT = 2
_KINETO_SILENT = "10"
"""torch's profiler, which measures activations at start, else writes lines of its own to stderr."""

_SWITCH = argparse.BooleanOptionalAction


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, and serve, plan or replay; returns the exit code. What needs no model is refused at once."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
    given = sys.argv[1:] if argv is None else argv
    try:
        args = parse_arguments(given)
        if args.command == "replay":
            return replay_traces(args.file, as_json=args.json)
        if args.command == "holders":
            sys.stdout.write(f"{holders(args.device, as_json=args.json)}\n")
            return 0
        config = engine_config(args)
        if args.command == "plan":
            return plan(config, tokens_per_request=args.tokens_per_request, as_json=args.json)
        if args.command == "kv-quality":
            return kv_quality(config, num_prompts=args.prompts, text=args.text, as_json=args.json)
    except (ConfigError, DeviceLedgerError) as error:
        code = report_start_failure(CoreFailed(start_error_kind(error), str(error)))
        starts_nothing = given[:1] in (["plan"], ["kv-quality"])
        return _BAD_INPUT if starts_nothing and isinstance(error, ConfigError) else code
    return serve(config, host=args.host, port=args.port, step_log=args.step_log)


def replay_traces(path: Path, *, as_json: bool) -> int:
    """Say where our scheduler parts from recorded decisions; 0 if nowhere, 1 if somewhere, 2 for an unreadable file."""
    try:
        report = replay_file(read_traces(path))
    except TraceFileError as error:
        sys.stderr.write(f"{error}\n")
        return _BAD_INPUT
    sys.stdout.write(f"{report.to_json() if as_json else report}\n")
    return 1 if report.differences else 0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line's flags, over those of the file that `--config` names.

    Raises:
        ConfigError: for a mistake in the file, or two models; argparse ends the process for another one on the command
            line.
    """
    parser, serve_parser = build_parsers()
    args = parser.parse_args(argv)
    if args.command in ("replay", "holders"):
        return args
    if None not in (args.model, args.model_flag) and args.model != args.model_flag:
        raise ConfigError(f"two models are named, {args.model!r} and --model {args.model_flag!r}: leave one out")
    if args.config is None:
        return args
    command, *given = argv
    return parser.parse_args([command, *flags_of_file(args.config, serve_parser), *given])


def build_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The whole command line's parser and that of `serve`, whose defaults are those of `EngineConfig`."""
    parser = argparse.ArgumentParser(prog="python -m engine", description="The built-in LLM serving engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("serve", help="serve a model over an OpenAI-compatible API", allow_abbrev=False)
    command.epilog = "Sizes are plain numbers, or end in a suffix: 16k is 16,000 and 16K is 16,384."
    add = command.add_argument
    add("model", nargs="?", help="a local Hugging Face folder, a hub id, or `embedded`: the model that ships with us")
    add("--model", dest="model_flag", metavar="MODEL", help="the same as a flag")
    add("--config", type=Path, metavar="FILE.yaml", help="read flags from a file; the command line wins")
    add("--host", default="127.0.0.1", help="address to listen on" + _DEFAULT)
    add("--port", type=_port, default=8000, help="0 picks a free one and says which" + _DEFAULT)
    add("--step-log", type=Path, metavar="FILE.jsonl", help=f"append a line a step. {COLUMNS}")
    add("--served-model-name", metavar="NAME", help="name that clients use (default: MODEL)")
    add("--max-num-seqs", type=_size, metavar="N", help="most requests running at once" + _DEFAULT)
    add("--max-num-batched-tokens", type=_size, metavar="TOKENS", help="token budget of one step" + _DEFAULT)
    add("--gpu-memory-utilization", type=float, metavar="SHARE", help="share of the memory to take" + _DEFAULT)
    add(
        "--max-model-len",
        type=_size,
        metavar="TOKENS",
        help="most tokens of a request, outputs too (default: the model's)",
    )
    add("--enable-chunked-prefill", action=_SWITCH, help="whether a prompt may be split over steps" + _DEFAULT)
    add("--enable-prefix-caching", action=_SWITCH, help="share the KV blocks of equal prefixes" + _DEFAULT)
    add("--enforce-eager", action=_SWITCH, help="no captured graphs on a GPU" + _DEFAULT)
    add("--max-num-scheduled-tokens", type=_size, metavar="TOKENS", help="most tokens of a step (default: the budget)")
    add("--long-prefill-token-threshold", type=_size, metavar="TOKENS", help="most of one prompt a step; 0: any")
    add("--max-num-active-seqs", type=_size, metavar="N", help="most running at once (default: max-num-seqs)")
    add("--watermark", type=float, metavar="SHARE", help="KV blocks that admission leaves free" + _DEFAULT)
    add("--scheduler-reserve-full-isl", action=_SWITCH, help="admit only what fits as a whole" + _DEFAULT)
    add("--max-num-queued-reqs", type=_size, metavar="N", help="requests at once, more get 503 (default: no limit)")
    add("--max-num-queued-tokens", type=_size, metavar="TOKENS", help="prompt tokens in prefill, more get 503")
    add("--data-parallel-size", type=int, metavar="CORES", help="cores behind one server" + _DEFAULT)
    add("--tensor-parallel-size", type=int, metavar="DEVICES", help="devices of one core; only 1 here" + _DEFAULT)
    add("--kv-cache-dtype", help="auto or fp8" + _DEFAULT)
    add("--block-size", type=int, metavar="TOKENS", help="tokens in a KV block" + _DEFAULT)
    add("--num-gpu-blocks-override", type=int, metavar="BLOCKS", help="KV blocks, instead of what the memory yields")
    add("--device-memory", dest="device_memory_bytes", type=_size, metavar="BYTES", help="on CPU, the device's size")
    add("--device", help="cpu, cuda or auto" + _DEFAULT)
    add("--dtype", help="float32, bfloat16, float16 or auto" + _DEFAULT)
    add("--executor", metavar="NAME", help="torch computes, simulated waits as --law says" + _DEFAULT)
    add("--law", metavar="LAW", help=f"what to simulate: {', '.join(law_names())}, or a path to a YAML file")
    add("--load-format", help="safetensors, dummy or auto" + _DEFAULT)
    add("--seed", type=int, help="for dummy weights, and for requests that bring none" + _DEFAULT)
    add("--cpu-omp-threads-bind", metavar="CPUS", help="auto, nobind, count:N or a list a core: 0-3|4-7" + _DEFAULT)
    replay = commands.add_parser("replay", help="compare the scheduler with recorded decisions of vLLM's")
    replay.add_argument(
        "file", type=Path, metavar="FILE", help="traces, such as tests/golden/vllm-scheduler-traces.json"
    )
    replay.add_argument("--json", action="store_true", help="write the outcome as JSON")
    holding = commands.add_parser("holders", help="say which engines hold a CPU's device now")
    holding.add_argument("--device", default="cpu:0", help="its name" + _DEFAULT)
    holding.add_argument("--json", action="store_true", help="write them as JSON")
    command.set_defaults(**{field.name: field.default for field in fields(EngineConfig) if field.name != "model"})
    plan_text = "say what a start with the same flags would do with the memory"
    planning = commands.add_parser("plan", help=plan_text, parents=[command], add_help=False, allow_abbrev=False)
    planning.add_argument(
        "--tokens-per-request", type=_size, metavar="TOKENS", help="how many such requests fit at once"
    )
    planning.add_argument("--json", action="store_true", help="write the calculation as JSON")
    quality_text = "compare a model's answers with an fp8 KV cache and with its own dtype"
    quality = commands.add_parser(
        "kv-quality", help=quality_text, parents=[command], add_help=False, allow_abbrev=False
    )
    quality.add_argument("--prompts", type=int, default=16, metavar="N", help="random prompts to answer" + _DEFAULT)
    quality.add_argument("--text", type=Path, metavar="FILE", help="score this text (default: texts the model makes)")
    quality.add_argument("--json", action="store_true", help="write the comparison as JSON")
    return parser, command


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The config that parsed flags ask for.

    Raises:
        ConfigError: for values that can never work.
    """
    model = args.model or args.model_flag
    if model is None:
        raise ConfigError("no model: name one on the command line or as `model` in the config file")
    given = {field.name: getattr(args, field.name) for field in fields(EngineConfig)}
    return EngineConfig(**given | {"model": model})


def flags_of_file(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The flags that a YAML file stands for: keys with dashes or underscores, `no-…: true` for a negative.

    Raises:
        ConfigError: for a file that cannot be read, an unknown key (naming the nearest), a setting that is made twice,
            or a value of a wrong kind.
    """
    flags = known_flags(parser)
    parts: list[str] = []
    setters: dict[str, str] = {}
    for key, value in read_mapping(path, f"--config {path}").items():
        parts += _flag_of_entry(path, str(key), value, flags)
        other = setters.setdefault(flags[_flag_name(str(key))].dest, str(key))
        if other != key:
            raise ConfigError(f"--config {path}: {other!r} and {key!r} set the same: leave one out")
    return parts


def _flag_name(key: str) -> str:
    return key.replace("_", "-")


def known_flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Every flag a file may set, without its leading dashes, and what reads it."""
    actions = [action for action in parser._actions if action.dest not in ("help", "config")]  # noqa: SLF001 - no public list
    return {option.removeprefix("--"): action for action in actions for option in action.option_strings}


def _flag_of_entry(path: Path, key: str, value: object, flags: dict[str, argparse.Action]) -> list[str]:
    name = _flag_name(key)
    if name not in flags:
        nearest = difflib.get_close_matches(name, flags, n=1, cutoff=0.4)
        hint = f"; the nearest known one is {nearest[0]!r}" if nearest else ""
        raise ConfigError(f"--config {path}: unknown key {key!r}{hint}")
    action = flags[name]
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"--config {path}: {key}={value!r} must be true or false")
        positive = name.removeprefix("no-")
        return [f"--{positive}" if value != name.startswith("no-") else f"--no-{positive}"]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"--config {path}: {key}={value!r} must be one number or text")
    if "\0" in str(value):
        raise ConfigError(f"--config {path}: {key}={value!r} holds a NUL, which no name may")
    if callable(action.type):
        try:
            action.type(str(value))
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ConfigError(f"--config {path}: {key}={value!r} cannot be: {error}") from error
    return [f"--{name}={value}"]


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _port(text: str) -> int:
    if text.isdecimal() and int(text) <= _MAX_PORT:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port: write a number from 0 to {_MAX_PORT}")


if __name__ == "__main__":
    sys.exit(main())
