"""Several engines on one device, as real processes: each keeps to its share, and no more start than fit."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import urllib.request

import psutil
import pytest

from tests.fakes.serving import Serving, serving, start, wait_until_gone

MIB = 2**20
DEVICE_MIB = 192
_PR_SET_CHILD_SUBREAPER = 36


def _command(share: float, *more: str) -> list[str]:
    sizes = ("--device-memory", f"{DEVICE_MIB}M", "--max-model-len", "256", "--max-num-seqs", "8", "--port", "0")
    flags = ("--max-num-batched-tokens", "64", "--gpu-memory-utilization", str(share), "--device", "cpu")
    return [sys.executable, "-m", "engine", "serve", "embedded", *sizes, *flags, *more]


def _memory(server: Serving) -> dict[str, int]:
    """What the server says of its memory, by part."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:  # noqa: S310 - our own server
        page = answer.read().decode()
    parts = re.findall(r'engine:memory_bytes\{engine="0",part="(\w+)"\} (\S+)', page)
    return {part: int(float(value)) for part, value in parts}


def _refusal(command: list[str]) -> dict[str, object]:
    process = start(command)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    (event,) = [line for line in errors.splitlines() if line.startswith('{"event": "start_failed"')]
    return dict(re.findall(r'"(kind|message)": "(.*?)"[,}]', event))


def test_two_engines_share_a_device_and_a_third_is_told_who_holds_it() -> None:
    """Two halves run side by side, each inside its half, by its own figures and by the system's; no more fits."""
    with serving(_command(0.5)) as first, serving(_command(0.5)) as second:
        for server, free in ((first, DEVICE_MIB * MIB), (second, DEVICE_MIB * MIB // 2)):
            memory = _memory(server)
            parts = [memory[part] for part in ("weights", "activation_peak", "request_buffers", "kv_cache")]
            assert (memory["total"], memory["free"]) == (DEVICE_MIB * MIB, free)
            assert sum(parts) == memory["requested"] == DEVICE_MIB * MIB // 2
            # All of it is there: a neighbour that starts later takes nothing away.
            assert server.core().memory_full_info().pss > memory["weights"] + memory["kv_cache"]
        refused = _refusal(_command(0.1))
        cores = [first.core().pid, second.core().pid]
    assert refused["kind"] == "infrastructure"
    for figure in ("19.20 MiB of 192.00 MiB", "0 bytes is free now", *(f"pid {pid} holds 96.00 MiB" for pid in cores)):
        assert figure in str(refused["message"])


def test_what_does_not_fit_beside_another_is_refused_with_both_figures_and_fits_elsewhere() -> None:
    """0.6 and 0.6 do not run on one device; the message offers the share that fits, and `cpu:1` is a device apart."""
    with serving(_command(0.6)) as first:
        refused = _refusal(_command(0.6))
        assert refused["kind"] == "infrastructure"
        for figure in ("115.20 MiB of 192.00 MiB", "76.80 MiB is free now", "at most 0.40", str(first.core().pid)):
            assert figure in str(refused["message"])
        with serving(_command(0.6, "--device", "cpu:1")) as elsewhere:
            assert _memory(elsewhere)["free"] == DEVICE_MIB * MIB
            with urllib.request.urlopen(f"{elsewhere.url}/metrics") as answer:  # noqa: S310 - our own server
                assert b'device="cpu:1"' in answer.read()


@pytest.fixture
def _orphans_are_ours():  # type: ignore[no-untyped-def]
    """Processes whose parent dies become this one's children, which reaps them at the end only."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
    yield
    assert prctl(_PR_SET_CHILD_SUBREAPER, 0) == 0


@pytest.mark.usefixtures("_orphans_are_ours")
def test_a_killed_engine_holds_nothing_though_its_core_is_never_reaped() -> None:
    """`kill -9` and start again: the next launch gets the whole device, whatever became of the old core's parent."""
    with serving(_command(0.9)) as killed:
        core = killed.core()
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        wait_until_gone([core])
        assert core.status() == psutil.STATUS_ZOMBIE
        with serving(_command(0.9)) as again:
            assert _memory(again)["free"] == DEVICE_MIB * MIB
        os.waitpid(core.pid, 0)
