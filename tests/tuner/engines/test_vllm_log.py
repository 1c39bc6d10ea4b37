"""Why a vLLM did not start, by excerpts of what a real one wrote (tests/golden/vllm_logs), and by older wordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.engines import vllm_log
from tuner.engines.device_return import NotFree, unless_disturbed
from tuner.engines.device_use import DeviceUse
from tuner.engines.vllm import VLLM
from tuner.records import Failed, FailureKind

LOGS = Path(__file__).parents[2] / "golden" / "vllm_logs"
GIB = 2**30


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        (
            "budget-below-sequences",
            FailureKind.INVALID_CONFIG,
            "max_num_batched_tokens (8) must be greater than or equal to max_num_seqs (16).",
        ),
        (
            "share-above-one",
            FailureKind.INVALID_CONFIG,
            "gpu_memory_utilization: Input should be less than or equal to 1",
        ),
        ("unknown-flag", FailureKind.INVALID_CONFIG, "unrecognized arguments: --max-nonsense 3"),
        ("unknown-kv-cache-dtype", FailureKind.INVALID_CONFIG, "argument --kv-cache-dtype: invalid choice: 'int3'"),
        (
            "longer-than-the-model",
            FailureKind.INVALID_CONFIG,
            "User-specified max_model_len (4096) is greater than the derived max_model_len",
        ),
        ("model-not-on-the-hub", FailureKind.INVALID_CONFIG, "Cannot find an appropriate cached snapshot folder"),
        (
            "share-above-free-memory-cpu",
            FailureKind.OOM_STARTUP,
            "(22.03/23.54 GiB) on startup is less than desired CPU memory utilization (0.999, 23.52 GiB)",
        ),
        ("no-share-left-for-kv", FailureKind.NO_KV_MEMORY, "less than requested memory for kv (-0.16/0.47 GiB)"),
        (
            "kv-holds-no-request",
            FailureKind.NO_KV_MEMORY,
            "To serve at least one request with the model's max seq len (1024)",
        ),
        ("port-taken", FailureKind.INFRASTRUCTURE, "[Errno 98] Address already in use"),
    ],
)
def test_the_reason_is_found_above_the_last_line(name: str, kind: FailureKind, told: str) -> None:
    """A study that took the last line would learn `Engine core initialization failed` of every setting."""
    log = LOGS / f"{name}.log"
    failed = VLLM.last_words(log, was_ready=False, exit_code=2 if name.startswith("unknown") else 1)
    assert failed.kind is kind
    assert told in failed.detail
    assert not failed.detail.startswith("(")


def test_a_worker_that_died_is_named_and_not_its_echoes() -> None:
    """`EngineCore encountered an issue` is what everybody behind it says, whatever happened."""
    failed = VLLM.last_words(LOGS / "core-killed.log", was_ready=True, exit_code=0)
    assert failed.kind is FailureKind.CRASHED
    assert failed.detail.startswith("Worker proc VllmWorker-0 died unexpectedly")


def test_a_process_that_was_killed_and_said_nothing_condemns_no_setting(tmp_path: Path) -> None:
    """The kernel, or a person, ended it: the log has progress and no reason."""
    log = tmp_path / "engine.log"
    log.write_text("(EngineCore pid=9) INFO 12-01 04:11:13 [core.py:133] Initializing a V1 LLM engine\n")
    assert VLLM.last_words(log, was_ready=False, exit_code=-9).kind is FailureKind.INFRASTRUCTURE
    assert VLLM.last_words(log, was_ready=False, exit_code=1).kind is FailureKind.CRASHED


def test_a_limit_of_its_own_on_a_start_is_no_crash(tmp_path: Path) -> None:
    """Whoever has set it in the environment reads that a start took too long, and which variable says how long."""
    log = tmp_path / "engine.log"
    log.write_text(
        "(APIServer pid=9) TimeoutError: Timed out waiting for engine core processes to start. This is often caused by "
        "slow weight loading for large models. Waited 60s (configured by VLLM_ENGINE_READY_TIMEOUT_S).\n"
    )
    failed = VLLM.last_words(log, was_ready=False, exit_code=1)
    assert failed.kind is FailureKind.START_TIMEOUT
    assert "VLLM_ENGINE_READY_TIMEOUT_S" in failed.detail


GPU_SHORT = (
    "(Worker_TP0 pid=9) ERROR 12-01 04:11:19 [core.py:1] ValueError: Free memory on device cuda:0 (3.10/79.20 GiB) on "
    "startup is less than desired GPU memory utilization (0.9, 71.28 GiB). Decrease GPU memory utilization or reduce "
    "GPU memory used by other processes."
)
V0_SHORT = (
    "ValueError: Free memory on device (3.10/79.20 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.28 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


@pytest.mark.parametrize("line", [GPU_SHORT, V0_SHORT])
@pytest.mark.parametrize(
    ("held_gib", "kind"), [(76, FailureKind.INFRASTRUCTURE), (0.3, FailureKind.OOM_STARTUP)], ids=["others", "alone"]
)
def test_memory_that_others_hold_condemns_no_share(
    tmp_path: Path, line: str, held_gib: float, kind: FailureKind
) -> None:
    """A neighbour's server on the device would else rule out shares that work on it when it is free."""
    log = tmp_path / "engine.log"
    log.write_text(line + "\n")
    failed = VLLM.last_words(log, was_ready=False, exit_code=1)
    assert failed.kind is FailureKind.OOM_STARTUP
    missing = VLLM.not_free(failed.detail)
    assert missing == NotFree(requested_bytes=round(71.28 * GIB))
    use = DeviceUse(device="GPU-a", total_bytes=80 * GIB, used_bytes=round(held_gib * GIB), by_pid=None)
    judged = unless_disturbed(failed, (use,), (use,), missing=missing)
    assert judged.kind is kind
    assert "71.28 GiB" in judged.detail


def test_other_lack_of_memory_is_the_settings_own_whoever_is_on_the_device() -> None:
    """Only what a start found taken before it began is somebody else's."""
    failed = Failed(kind=FailureKind.OOM_STARTUP, detail="torch.OutOfMemoryError: CUDA out of memory.")
    use = DeviceUse(device="GPU-a", total_bytes=80 * GIB, used_bytes=9 * GIB, by_pid=None)
    missing = VLLM.not_free(failed.detail)
    assert missing is None
    assert unless_disturbed(failed, (use,), (use,), missing=missing) == failed


STARTING = """\
(Worker pid=9) INFO 12-01 04:11:19 [cpu_model_runner.py:68] Starting to load model /models/m4...
(Worker pid=9) INFO 12-01 04:11:19 [default_loader.py:501] Loading weights took 0.01 seconds
(Worker pid=9) INFO 12-01 04:11:22 [cpu_worker.py:260] Auto set (1.20/23.54) GiB for KV cache on node 0, with 2.35 GiB \
requested memory for the worker. 1.15 GiB memory was consumed by non-kv usages.
(EngineCore pid=9) INFO 12-01 04:11:23 [kv_cache_utils.py:2327] CPU KV cache size: 314,112 tokens, Maximum concurrency
"""


def test_where_the_memory_went_is_read_and_what_is_not_said_is_unknown() -> None:
    """A figure that vLLM does not give is no zero: a headroom of nothing would look like a finding."""
    memory = vllm_log.memory_of(STARTING)
    assert memory.requested_bytes == round(2.35 * GIB)
    assert memory.kv_cache_bytes == round(1.20 * GIB)
    assert memory.weights_bytes is None
    assert memory.activation_peak_bytes is None
    assert vllm_log.memory_total(STARTING) == round(23.54 * GIB)
    on_gpu = "Model loading took 15.27 GiB memory and 2.1 seconds\nAvailable KV cache memory: 52.30 GiB\n"
    told = vllm_log.memory_of(on_gpu + on_gpu.replace("52.30", "51.90"))
    assert (told.weights_bytes, told.kv_cache_bytes) == (round(15.27 * GIB), round(51.90 * GIB))
    assert told.requested_bytes is None
    assert vllm_log.memory_of("").kv_cache_bytes is None
    rounded = vllm_log.memory_of(
        "Model loading took 0.0 GiB memory and 0.1 seconds\nExplicitly set (0.0/23.54) GiB for KV cache"
    )
    assert (rounded.weights_bytes, rounded.kv_cache_bytes) == (None, None)


def test_a_start_is_told_of_in_its_own_order() -> None:
    """Minutes of a start show what they go into."""
    told = [words for line in STARTING.splitlines() if (words := VLLM.progress(line)) is not None]
    assert told == ["loads the model", "has its weights", "has its KV cache"]
