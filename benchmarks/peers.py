"""Engines that can be asked the same requests: ours and vLLM over HTTP, Hugging Face `generate` in a process.

Each is started with the same weights on the same CPUs, and says with which settings.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import uvloop
from checkpoints import MAX_MODEL_LEN

from tuner.engines.process import RunningEngine, free_port, launched, wait_until_ready
from tuner.load.client import read_completion, request_bytes
from tuner.load.connection import Connection, Endpoint, Exchange, connect
from tuner.load.prompts import PromptRequest
from tuner.load.stream import events

MAX_NUM_SEQS, TOKEN_BUDGET = 64, 1024
"""For both servers, above any concurrency measured and as vLLM was tuned for this size of model."""

_START_TIMEOUT_S = 600.0
_NAME = "bench"


class Peer(Protocol):
    """An engine that is up."""

    name: str
    settings: str
    """What it was started with, for the record."""

    def run(self, requests: Sequence[PromptRequest], concurrency: int) -> float:
        """Seconds to complete all, `concurrency` at a time.

        Raises:
            RuntimeError: where a request fails or brings another number of tokens than asked.
        """
        ...

    def greedy_text(self, request: PromptRequest) -> str:
        """What it generates for one request."""
        ...


class HttpPeer:
    """A server, loaded with the tuner's own client: streams, token ids in, running usage out."""

    def __init__(self, name: str, settings: str, engine: RunningEngine) -> None:
        self.name, self.settings = name, settings
        self._endpoint = Endpoint.from_url(engine.base_url)

    def run(self, requests: Sequence[PromptRequest], concurrency: int) -> float:
        """A closed loop: each of `concurrency` users sends its next request when its last has ended."""
        began = perf_counter()
        exchanges = uvloop.run(self._closed_loop(requests, concurrency))
        seconds = perf_counter() - began
        for request, exchange in exchanges:
            record = read_completion(exchange, request, origin_s=began, now_s=perf_counter())
            if record.error is not None or record.num_output_tokens != request.max_tokens:
                raise RuntimeError(
                    f"{self.name}: {record.num_output_tokens} of {request.max_tokens} tokens: {record.error}"
                )
        return seconds

    def greedy_text(self, request: PromptRequest) -> str:
        """The texts of one stream, put together."""
        ((_, exchange),) = uvloop.run(self._closed_loop([request], 1))
        frames: list[dict[str, Any]] = [json.loads(data) for _, data in events(exchange.pieces) if data != "[DONE]"]
        return "".join(choice["text"] for frame in frames for choice in frame.get("choices", ()))

    async def _closed_loop(
        self, requests: Sequence[PromptRequest], concurrency: int
    ) -> list[tuple[PromptRequest, Exchange]]:
        waiting, done = iter(requests), []

        async def user(connection: Connection) -> None:
            for request in waiting:
                payload = request_bytes(request, endpoint=self._endpoint, model=_NAME)
                exchange, ended = connection.start(payload, intended_s=perf_counter())
                await ended
                done.append((request, exchange))

        connections = [await connect(self._endpoint) for _ in range(min(concurrency, len(requests)))]
        await asyncio.gather(*(user(connection) for connection in connections))
        for connection in connections:
            connection.abort()
        return done


class TransformersPeer:
    """`generate` on static batches: sorted by output, then prompt, so that the least is padded on either side."""

    name = "transformers"
    settings = "generate, float32, sdpa, KV cache, left padding, static batches sorted by output and prompt length"

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, requests: Sequence[PromptRequest], concurrency: int) -> float:
        """Batches of `concurrency`, one after the other."""
        ordered = sorted(requests, key=lambda request: (request.max_tokens, len(request.prompt_token_ids)))
        batches = [ordered[start : start + concurrency] for start in range(0, len(ordered), concurrency)]
        seconds: float = self._ask(batches)["seconds"]
        return seconds

    def greedy_text(self, request: PromptRequest) -> str:
        """A batch of one."""
        text: str = self._ask([[request]])["first_text"]
        return text

    def _ask(self, batches: Sequence[Sequence[PromptRequest]]) -> dict[str, Any]:
        plain = [
            [{"prompt": list(item.prompt_token_ids), "max_tokens": item.max_tokens} for item in batch]
            for batch in batches
        ]
        return _exchange_line(self._process, {"batches": plain})


@contextmanager
def ours(folder: Path, cpus: Sequence[int], work: Path) -> Iterator[Peer]:
    """Our engine, started as a user starts it, but without prefix caching."""
    settings = {
        "--max-num-seqs": MAX_NUM_SEQS,
        "--max-num-batched-tokens": TOKEN_BUDGET,
        "--dtype": "float32",
        "--cpu-omp-threads-bind": ",".join(map(str, cpus)),
        # A virtual device of its own, so that other engines on this machine take nothing from its budget.
        "--device": "cpu:1",
        "--device-memory": 2**30,
    }
    # As for vLLM: no prompt comes twice, so that a cache of prefixes would only cost.
    switches = ["--no-enable-prefix-caching"]
    command = [sys.executable, "-m", "engine", "serve", str(folder), *_flags(settings), *switches]
    with _server("ours", " ".join([_said(settings), *switches]), command, dict(os.environ), work) as peer:
        yield peer


@contextmanager
def vllm(python: Path, folder: Path, cpus: Sequence[int], work: Path) -> Iterator[Peer]:
    """The real vLLM, with the settings that were fastest for models of this size.

    Three rounds on a busy machine decided them: compiling gained nothing over eager, and Intel's OpenMP, which comes
    with it and which it recommends, was several times faster than the system's.
    """
    settings = {
        "--max-num-seqs": MAX_NUM_SEQS,
        "--max-num-batched-tokens": TOKEN_BUDGET,
        "--max-model-len": MAX_MODEL_LEN,
        "--dtype": "float32",
        "--kv-cache-memory-bytes": "512M",
        "--distributed-executor-backend": "uni",
    }
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
    }
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        environment["LD_PRELOAD"] = str(openmp)
    switches = ["--enforce-eager", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *_flags(settings), *switches]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = " ".join([_said(settings), *switches, *(f"{name}={value}" for name, value in environment.items())])
    with _server("vLLM", said, command, inherited | environment, work) as peer:
        yield peer


@contextmanager
def transformers(folder: Path, cpus: Sequence[int]) -> Iterator[Peer]:
    """Hugging Face, pinned to the same CPUs with as many threads."""
    script = Path(__file__).with_name("transformers_peer.py")
    command = [sys.executable, str(script), str(folder), ",".join(map(str, cpus))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            _read_line(process)
            yield TransformersPeer(process)
        finally:
            process.kill()


@contextmanager
def _server(name: str, said: str, command: list[str], environment: dict[str, str], work: Path) -> Iterator[Peer]:
    port = free_port()
    work.mkdir()
    arguments = [*command, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", _NAME]
    with launched(arguments, port=port, environment=environment, directory=work) as engine:
        list(wait_until_ready(engine, timeout_s=_START_TIMEOUT_S))
        yield HttpPeer(name, said, engine)


def _flags(settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in (name, str(value))]


def _said(settings: dict[str, Any]) -> str:
    return " ".join(_flags(settings))


def _exchange_line(process: subprocess.Popen[str], message: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None  # noqa: S101 - opened as a pipe
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()
    return _read_line(process)


def _read_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None  # noqa: S101 - opened as a pipe
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"transformers ended with exit code {process.wait()}; its error is above")
    answer: dict[str, Any] = json.loads(line)
    return answer
