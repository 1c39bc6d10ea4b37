"""What the command-line tools of AMD and Ascend say of their devices' memory. The parsers are pure.

Formats: `amd-smi metric --mem-usage --json` (amdsmi's `amdsmi_vram_usage_t`, in MiB whatever it calls them),
`rocm-smi --showmeminfo vram --json` (bytes, as texts), and the table of `npu-smi info` (Huawei's npu-smi reference).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from tuner.engines.device_use import DeviceUse, Reading

TIMEOUT_S = 10.0
"""A tool that takes longer hangs with its driver. Unit: seconds."""

_MIB = 2**20
_CHIP = re.compile(r"\|\s*(?P<id>\d*)[^|]*\|\s*\S+:\S+:\S+\s*\|.*?(?P<used>\d+)\s*/\s*(?P<total>\d+)\s*\|\s*$")
_NPU = re.compile(r"\|\s*(?P<id>\d+)\s+[^|]*\|\s*\w+\s*\|")
_PROCESS = re.compile(r"\|\s*(?P<npu>\d+)(?:\s+(?P<chip>\d+))?\s*\|\s*(?P<pid>\d+)\s*\|[^|]*\|\s*(?P<mib>\d+)\s*\|")


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorTool:
    """A tool, and what hides devices from the processes that compute on them."""

    command: tuple[str, ...]
    parse: Callable[[str], tuple[DeviceUse, ...]]
    """Raises AttributeError, LookupError, TypeError or ValueError for anything that is not its format."""

    shown_by: tuple[str, ...]
    """Variables with the numbers of the devices a process is shown; two that are set renumber each other."""


def amd_smi(text: str) -> tuple[DeviceUse, ...]:
    """By `amd-smi metric --mem-usage --json`, a list or, in later versions, an object with one; no process is named."""
    said = json.loads(text)
    entries = said["gpu_data"] if isinstance(said, dict) else said
    return tuple(
        DeviceUse(
            device=f"gpu {entry['gpu']}",
            total_bytes=_mib(entry["mem_usage"]["total_vram"]),
            used_bytes=_mib(entry["mem_usage"]["used_vram"]),
            by_pid=None,
        )
        for entry in entries
    )


def _mib(figure: Mapping[str, Any]) -> int:
    if figure.get("unit", "MB") != "MB":
        raise ValueError(f"a unit that is not known: {figure}")
    return int(figure["value"]) * _MIB


def rocm_smi(text: str) -> tuple[DeviceUse, ...]:
    """By `rocm-smi --showmeminfo vram --json`; no process is named."""
    cards = {name: said for name, said in json.loads(text).items() if re.fullmatch(r"card\d+", name)}
    return tuple(
        DeviceUse(
            device=name,
            total_bytes=int(said["VRAM Total Memory (B)"]),
            used_bytes=int(said["VRAM Total Used Memory (B)"]),
            by_pid=None,
        )
        for name, said in sorted(cards.items(), key=lambda entry: int(entry[0].removeprefix("card")))
    )


def npu_smi(text: str) -> tuple[DeviceUse, ...]:
    """By the table of `npu-smi info`: of a chip the last pair, HBM where it has some; processes by NPU and chip.

    Raises:
        ValueError: where no chip can be read.
    """
    chips = list(_chips(text))
    if not chips:
        raise ValueError("no chip in this table")
    held: dict[tuple[str, str], dict[int, int]] = {}
    for found in map(_PROCESS.match, text.splitlines()):
        if found is not None:
            of_chip = held.setdefault((found["npu"], found["chip"] or ""), {})
            of_chip[int(found["pid"])] = int(found["mib"]) * _MIB
    return tuple(
        DeviceUse(
            device=f"npu {npu}{f' chip {chip}' if chip else ''}",
            total_bytes=int(total) * _MIB,
            used_bytes=int(used) * _MIB,
            by_pid=held.get((npu, chip), {}),
        )
        for npu, chip, used, total in chips
    )


def _chips(text: str) -> Iterator[tuple[str, str, str, str]]:
    """NPU, chip, used and total of each chip: a line of its NPU comes before it."""
    npu = None
    for line in text.splitlines():
        chip = _CHIP.match(line)
        if chip is not None and npu is not None:
            yield npu, chip["id"], chip["used"], chip["total"]
        elif (named := _NPU.match(line)) is not None:
            npu = named["id"]


TOOLS = (
    VendorTool(
        command=("amd-smi", "metric", "--mem-usage", "--json"),
        parse=amd_smi,
        shown_by=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    ),
    VendorTool(
        command=("rocm-smi", "--showmeminfo", "vram", "--json"),
        parse=rocm_smi,
        shown_by=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    ),
    VendorTool(command=("npu-smi", "info"), parse=npu_smi, shown_by=("ASCEND_RT_VISIBLE_DEVICES",)),
)
"""The first that is installed is asked."""


def installed_tool() -> VendorTool | None:
    """The tool of another vendor than NVIDIA that is there, or None."""
    return next((tool for tool in TOOLS if shutil.which(tool.command[0]) is not None), None)


def ask(tool: VendorTool, environment: Mapping[str, str], num_devices: int) -> Reading:
    """The memory of the first devices that a launch with this environment is shown; None where that is not known."""
    try:
        said = subprocess.run(tool.command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        devices = tool.parse(said.stdout)
    except (OSError, subprocess.SubprocessError, AttributeError, LookupError, TypeError, ValueError):
        return None
    shown = [environment[name] for name in tool.shown_by if environment.get(name)]
    if len(shown) > 1:
        return None
    names = [name.strip() for name in shown[0].split(",")] if shown else [str(n) for n in range(len(devices))]
    wanted = names[:num_devices]
    if len(wanted) < num_devices or not all(name.isdecimal() and int(name) < len(devices) for name in wanted):
        return None
    return tuple(_of_this_namespace(devices[int(name)]) for name in wanted)


def _of_this_namespace(use: DeviceUse) -> DeviceUse:
    """A pid that is nobody's here is one of another namespace, and then ours cannot be told from others."""
    is_ours = use.by_pid is not None and all(map(psutil.pid_exists, use.by_pid))
    return use if is_ours else use.model_copy(update={"by_pid": None})
