"""The memory that is watched is that of the GPUs a launch gets, and what cannot be known is not made up."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.engines.device_memory import memory_reader
from tuner.engines.device_use import DeviceUse
from tuner.job import EngineSpec

GIB = 2**30
TWO = ("GPU-aaaa", "GPU-bbbb")


class _NvmlError(Exception):
    """What the driver's library raises."""


class _NotSupportedError(_NvmlError):
    """As it does for MIG on a card that has none."""


class _Nvml:
    """A machine with cards of these UUIDs and models; the first holds 1 GiB, the second 2, and so on."""

    NVMLError = _NvmlError
    NVMLError_NotSupported = _NotSupportedError
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, uuids: tuple[str, ...], *, names: tuple[str, ...] = (), mig: str | None = None) -> None:
        self._uuids = uuids
        self._names = names or ("H200",) * len(uuids)
        self._mig = mig
        self.num_open = 0
        self.has_driver = True
        self.processes: list[SimpleNamespace] = []

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise _NvmlError
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return self._uuids[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != self._mig:
            raise _NvmlError
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return self._names[self._uuids.index(handle)]

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        if self._mig is None:
            raise _NotSupportedError
        return [int(handle == self._uuids[0]), 0]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        number = 9 if handle == self._mig else self._uuids.index(handle) + 1
        return SimpleNamespace(total=24 * GIB, used=number * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[SimpleNamespace]:  # noqa: N802
        return self.processes


def _read(
    monkeypatch: pytest.MonkeyPatch, nvml: _Nvml, environment: dict[str, str], *, num_gpus: int = 1, **engine: Any
) -> tuple[DeviceUse, ...] | None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reading = memory_reader(EngineSpec(**engine), environment, num_gpus=num_gpus)()
    assert nvml.num_open == 0
    return reading


@pytest.mark.parametrize(
    ("shown", "num_gpus", "devices"),
    [
        (None, 1, ["GPU-aaaa"]),
        (None, 2, ["GPU-aaaa", "GPU-bbbb"]),
        ("1", 1, ["GPU-bbbb"]),
        ("1,0", 2, ["GPU-bbbb", "GPU-aaaa"]),
        ("1, 0", 1, ["GPU-bbbb"]),
        ("GPU-bbbb", 1, ["GPU-bbbb"]),
        ("GPU-b", 1, ["GPU-bbbb"]),
        ("GPU-", 1, None),  # either
        ("GPU-cccc", 1, None),
        ("2", 1, None),
        ("0", 2, None),  # fewer than the launch takes
        ("MIG-1", 1, None),
    ],
)
def test_what_is_read_are_the_gpus_a_launch_gets(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, num_gpus: int, devices: list[str] | None
) -> None:
    """A job is not stopped for a neighbour's card, and a name that fits none or two is unknown."""
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    reading = _read(monkeypatch, _Nvml(TWO), environment, num_gpus=num_gpus)

    assert (None if reading is None else [use.device for use in reading]) == devices
    if reading is not None:
        assert [use.used_bytes for use in reading] == [(TWO.index(use.device) + 1) * GIB for use in reading]


def test_a_number_means_a_card_only_where_both_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA puts the fastest card first, the driver goes by slot: of two models a number alone may be the other one."""
    mixed = _Nvml(TWO, names=("T4", "H200"))
    assert _read(monkeypatch, mixed, {"CUDA_VISIBLE_DEVICES": "0"}) is None
    by_bus = _read(monkeypatch, mixed, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert by_bus is not None
    assert by_bus[0].device == "GPU-aaaa"


def test_a_mig_instance_is_read_by_its_own_name_and_its_card_never_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance's memory is not its card's: neighbours on the card are nobody's business."""
    divided = _Nvml(TWO, mig="MIG-1")
    instance = _read(monkeypatch, divided, {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert instance is not None
    assert instance[0].used_bytes == 9 * GIB
    assert _read(monkeypatch, divided, {"CUDA_VISIBLE_DEVICES": "0"}) is None
    assert _read(monkeypatch, divided, {"CUDA_VISIBLE_DEVICES": "GPU-a"}) is None
    assert _read(monkeypatch, divided, {"CUDA_VISIBLE_DEVICES": "1"}) is not None


def test_on_a_cpu_nothing_is_read_and_a_gpu_that_does_not_answer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not applicable keeps nobody off; what should be known and is not is no zero."""
    silent = _Nvml(())
    silent.has_driver = False
    assert _read(monkeypatch, silent, {}) == ()
    assert _read(monkeypatch, silent, {}, device="cuda") is None
    assert _read(monkeypatch, silent, {"CUDA_VISIBLE_DEVICES": "0"}) is None
    for cpu in ({"device": "cpu"}, {"device_memory": "1G"}, {"cpus": 1}, {"law": "h100-8b"}):
        assert _read(monkeypatch, _Nvml(TWO), {}, **cpu) == ()
    for hidden in ("", "-1", " "):
        assert _read(monkeypatch, _Nvml(TWO), {"CUDA_VISIBLE_DEVICES": hidden}) == ()


def test_processes_are_told_apart_only_where_the_driver_tells_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid of another namespace may be ours under another number: then nobody is named, and nobody is excused."""
    nvml = _Nvml(TWO)
    for pid, held, told in ((os.getpid(), GIB, {os.getpid(): GIB}), (os.getpid(), None, None), (2**30, GIB, None)):
        nvml.processes = [SimpleNamespace(pid=pid, usedGpuMemory=held)]
        reading = _read(monkeypatch, nvml, {})
        assert reading is not None
        assert reading[0].by_pid == told


def test_the_library_has_what_is_asked_of_it() -> None:
    """A stand-in that drifts from NVML proves nothing about a GPU."""
    nvml = pytest.importorskip("pynvml")
    assert [name for name in vars(_Nvml) if name.lower().startswith("nvml") and not hasattr(nvml, name)] == []
    assert issubclass(nvml.NVMLError_NotSupported, nvml.NVMLError)
