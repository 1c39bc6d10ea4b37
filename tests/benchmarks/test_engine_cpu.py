"""The benchmark's arithmetic and its smallest measurement; speed itself is nothing to test."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tuner.load.prompts import PromptRequest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def engine_cpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported as it is run: from its own folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    import engine_cpu  # type: ignore[import-not-found]

    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            monkeypatch.delitem(sys.modules, name)
    return engine_cpu  # type: ignore[no-any-return]


def test_ratios_are_taken_within_a_round(engine_cpu: ModuleType) -> None:
    """A machine twice as slow in one round must not read as a peer twice as fast."""

    def sample(peer: str, number: int, seconds: float) -> object:
        return engine_cpu.Sample(
            model="4-M", peer=peer, concurrency=8, round=number, output_tokens=100, seconds=seconds
        )

    result = engine_cpu.Result(
        created="now",
        machine="a machine",
        cpus=(0,),
        versions={"torch": "2"},
        settings={"ours": "--a 1", "vLLM": "--b 2"},
        parameters={"4-M": 4_200_000},
        agreement={"4-M": {"ours": True, "vLLM": False}},
        scheduler_step_ms=0.5,
        samples=tuple(
            sample(peer, number, seconds)
            for number, slow in enumerate((1.0, 2.0, 4.0))
            for peer, seconds in (("ours", 1.0 * slow), ("vLLM", 2.0 * slow))
        ),
    )
    table = engine_cpu.markdown(result)
    assert "| 4-M | 8 | 50 (25–100) | 25 (12–50) | 2.00 (2.00–2.00) |" in table
    assert "Greedy text differs from transformers': vLLM on 4-M." in table
    assert "0.50 ms a step with 256 running" in table


def test_lengths_are_the_same_every_round_and_prompts_are_not(engine_cpu: ModuleType) -> None:
    """All peers and rounds do the same work, and none can answer from a cache."""
    (shape, *_) = engine_cpu.SHAPES
    first, second = (engine_cpu._requests(shape, 30, entropy=number) for number in (1, 2))
    assert [len(a.prompt_token_ids) for a in first] == [len(b.prompt_token_ids) for b in second]
    assert [a.max_tokens for a in first] == [b.max_tokens for b in second]
    assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(first, second, strict=True))


def test_no_prompt_comes_twice(engine_cpu: ModuleType) -> None:
    """An engine that caches prefixes would look fast for prompts of an earlier cell."""

    class Listening:
        name = "ours"

        def __init__(self) -> None:
            self.heard: list[tuple[int, ...]] = []

        def run(self, requests: list[PromptRequest], _concurrency: int) -> float:
            self.heard += [request.prompt_token_ids for request in requests]
            return 1.0

    (shape, *_), peer = engine_cpu.SHAPES, Listening()
    list(engine_cpu._rounds(shape, [peer], most=2, deadline_s=float("inf")))
    assert len(peer.heard) == 2 * sum(engine_cpu.NUM_REQUESTS.values())
    assert len(set(peer.heard)) == len(peer.heard)


def test_the_schedulers_step_is_measured_with_all_running(engine_cpu: ModuleType) -> None:
    """A step with fewer requests would look cheap."""
    assert engine_cpu.scheduler_step_ms(running=5, prompt_tokens=20, steps=3) > 0


def test_a_slow_machine_gets_fewer_rounds_and_never_none(
    engine_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command keeps to its time, and its table has at least one figure a cell."""
    monkeypatch.setattr(engine_cpu, "_round", lambda *round_: iter(round_[2:]))
    (shape, *_) = engine_cpu.SHAPES
    assert list(engine_cpu._rounds(shape, [], most=3, deadline_s=0.0)) == [0]
    assert list(engine_cpu._rounds(shape, [], most=3, deadline_s=float("inf"))) == [0, 1, 2]
