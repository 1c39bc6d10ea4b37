"""Lack of memory is told from an engine's log by the line that decides, whatever stands around it."""

from __future__ import annotations

import pytest

from tuner.engines.memory_failures import memory_failure
from tuner.records import FailureKind

_BANNER = """\
INFO 10-06 12:00:01 [api_server.py:1971] vLLM API server version 0.11.0
(EngineCore_DP0 pid=212) INFO 10-06 12:00:07 [gpu_model_runner.py:2338] Starting to load model /models/m...
"""
_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 22.05 GiB"
)
_SAMPLER = (
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. "
    "Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
)
_NOT_FREE = (
    "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 19.84 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
_NOT_FREE_CPU = (
    "ValueError: Available memory on node 0 (3.10/15.62 GiB) on startup is less than desired CPU memory utilization "
    "(0.92, 14.37 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the fraction of CPU memory"
)
_NO_ROOM = (
    "ValueError: To serve at least one request with the models's max seq len (32768), (14.50 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (6.20 GiB)."
)
_CHAINED = f"""\
(EngineCore_DP0 pid=212) ERROR 10-06 12:01:07 [core.py:708] {_OOM}
(EngineCore_DP0 pid=212) ERROR 10-06 12:01:07 [core.py:708] The above exception was the direct cause of the following
(EngineCore_DP0 pid=212) ERROR 10-06 12:01:07 [core.py:708] {_SAMPLER}
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
_CAPTURING = (
    "\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE):  31%|███       | 21/67 [00:03<00:07,  6.12it/s]"
)
_CAPTURED = f"""{_CAPTURING}
(EngineCore_DP0 pid=212) INFO 10-06 12:00:40 [gpu_model_runner.py:3480] Graph capturing finished in 8 secs, took 0.3 GiB
"""


@pytest.mark.parametrize(
    ("log", "kind", "told"),
    [
        (_BANNER + _CHAINED, FailureKind.OOM_SAMPLER_WARMUP, "1024 dummy requests"),
        (_BANNER + _CAPTURED + _CHAINED, FailureKind.OOM_SAMPLER_WARMUP, "1024 dummy requests"),
        (
            f"{_BANNER}\x1b[1;36m(Worker pid=3)\x1b[0;0m {_SAMPLER}\n",
            FailureKind.OOM_SAMPLER_WARMUP,
            "(Worker pid=3) Run",
        ),
        (f"{_BANNER}{_CAPTURING}{_CAPTURING}\n{_OOM}\n", FailureKind.OOM_GRAPH_CAPTURE, "594.00 MiB"),
        (f"{_BANNER}{_CAPTURED}{_OOM}\n", FailureKind.OOM_STARTUP, "594.00 MiB"),
        (f"{_BANNER}{_OOM}\n", FailureKind.OOM_STARTUP, "594.00 MiB"),
        ("torch.cuda.OutOfMemoryError: HIP out of memory.", FailureKind.OOM_STARTUP, "HIP"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:115] . DefaultCPUAllocator: can't allocate memory: you tried",
            FailureKind.OOM_STARTUP,
            "DefaultCPUAllocator",
        ),
        (
            f"{_BANNER}(Worker pid=9) ERROR 12-01 09:06:54 [core.py:1063] MemoryError\n",
            FailureKind.OOM_STARTUP,
            "Worker",
        ),
        ("MemoryError: Unable to allocate 16.0 MiB for an array", FailureKind.OOM_STARTUP, "16.0 MiB"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", FailureKind.OOM_STARTUP, "bad_alloc"),
        (
            _NOT_FREE,
            FailureKind.OOM_STARTUP,
            "19.77/22.05 GiB",
        ),
        (_NOT_FREE_CPU, FailureKind.OOM_STARTUP, "3.10/15.62 GiB"),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            FailureKind.NO_KV_MEMORY,
            "cache blocks",
        ),
        (
            _NO_ROOM,
            FailureKind.NO_KV_MEMORY,
            "14.50 GiB",
        ),
    ],
)
def test_the_decisive_line_gives_the_kind_and_is_kept(log: str, kind: FailureKind, told: str) -> None:
    """A study learns what ran out of memory, and its user reads the line that says so."""
    failed = memory_failure(log, was_ready=False)
    assert failed is not None
    assert failed.kind is kind
    assert told in failed.detail
    assert "\x1b" not in failed.detail


def test_an_engine_that_had_answered_ran_out_while_serving() -> None:
    """A share that starts and then fails under load is not taken for one that cannot start."""
    failed = memory_failure(_BANNER + _CAPTURED + _OOM, was_ready=True)
    assert failed is not None
    assert failed.kind is FailureKind.OOM_RUNTIME


@pytest.mark.parametrize(
    "log",
    [
        "",
        _BANNER + _CAPTURED,
        "ValueError: max_num_batched_tokens (128) must be greater than or equal to max_num_seqs (256).",
        "INFO to avoid out of memory errors, lower gpu_memory_utilization",
        "INFO Available KV cache memory: 6.20 GiB",
        "(Worker pid=9) ERROR 12-01 09:06:54 [core.py:1063]     except MemoryError as error:",
    ],
)
def test_what_speaks_of_memory_only_is_no_failure_of_it(log: str) -> None:
    """A crash of another kind does not rule settings out for their memory."""
    assert memory_failure(log, was_ready=False) is None
