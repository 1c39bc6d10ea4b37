"""How much of a device's memory is in use now, and by whom where that can be seen.

Of an NVIDIA GPU the driver tells (NVML), of AMD's and Ascend's devices the vendor's tool, whichever is there. Where
nothing tells, the reading is unknown, the trial says so, and only the engine's own account of its memory is left. On a
CPU there is nothing to read: what the machine has available moves with every program on it, so that there the proof of
a device given back is that no process of the launch lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import psutil

from tuner.engines import vendor_tools
from tuner.engines.device_use import DeviceUse, Reading
from tuner.gpus import VARIABLE
from tuner.job import EngineSpec
from tuner.placement import needs_gpu_count

ReadMemory: TypeAlias = Callable[[], Reading]
"""Looks now."""


class _UnmappedError(Exception):
    """What CUDA calls this device is not known to be what the driver calls any."""


def memory_reader(engine: EngineSpec, environment: Mapping[str, str], *, num_gpus: int) -> ReadMemory:
    """What looks at the memory of the GPUs that a launch gets.

    Args:
        environment: the launch's; of the GPUs that `CUDA_VISIBLE_DEVICES` shows it takes the first.
        num_gpus: how many it takes.
    """
    shown = environment.get(VARIABLE)
    hidden = shown is not None and shown.strip().partition(",")[0] in ("", "-1")
    if hidden or not needs_gpu_count(engine):
        return lambda: ()
    without_driver: Reading = None if engine.device == "cuda" or shown else ()
    return lambda: _read(environment, num_gpus, without_driver)


def _read(environment: Mapping[str, str], num_gpus: int, without_driver: Reading) -> Reading:
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        tool = vendor_tools.installed_tool()
        return without_driver if tool is None else vendor_tools.ask(tool, environment, num_gpus)
    try:
        return tuple(_use(nvml, handle) for handle in _handles(nvml, environment, num_gpus))
    except (nvml.NVMLError, _UnmappedError):
        return None
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: ModuleType, environment: Mapping[str, str], num_gpus: int) -> list[Any]:
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    shown = environment.get(VARIABLE)
    names = [str(index) for index in range(len(gpus))] if shown is None else [name.strip() for name in shown.split(",")]
    if len(names) < num_gpus:
        raise _UnmappedError
    # CUDA numbers the fastest first unless told otherwise, the driver by bus: alike only where all are of one model.
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    one_order = by_bus or len({nvml.nvmlDeviceGetName(gpu) for gpu in gpus}) == 1
    return [_handle(nvml, name, gpus, one_order=one_order) for name in names[:num_gpus]]


def _handle(nvml: ModuleType, name: str, gpus: list[Any], *, one_order: bool) -> Any:
    """The device that CUDA calls `name`: a number, (the beginning of) a GPU's UUID, or a MIG instance's."""
    if name.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    if name.isdecimal():
        found = [gpus[int(name)]] if one_order and int(name) < len(gpus) else []
    else:
        found = [gpu for gpu in gpus if name and nvml.nvmlDeviceGetUUID(gpu).startswith(name)]
    if len(found) != 1 or _is_divided(nvml, found[0]):
        raise _UnmappedError
    return found[0]


def _is_divided(nvml: ModuleType, gpu: Any) -> bool:
    """Whether CUDA would take an instance of it, and which one is not said."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError_NotSupported:
        return False


def _use(nvml: ModuleType, handle: Any) -> DeviceUse:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return DeviceUse(
        device=nvml.nvmlDeviceGetUUID(handle),
        total_bytes=memory.total,
        used_bytes=memory.used,
        by_pid=_by_pid(nvml, handle),
    )


def _by_pid(nvml: ModuleType, handle: Any) -> dict[int, int] | None:
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    # A pid that is nobody's here is one of another namespace, and then ours cannot be told from others.
    if any(each.usedGpuMemory is None or not psutil.pid_exists(each.pid) for each in processes):
        return None
    return {each.pid: each.usedGpuMemory for each in processes}
