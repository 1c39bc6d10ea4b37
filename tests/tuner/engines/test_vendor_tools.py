"""AMD's and Ascend's tools are read as they write, and what is not their format is unknown."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tuner.engines.vendor_tools import TOOLS, amd_smi, ask, installed_tool, npu_smi, rocm_smi

MIB = 2**20


def _mib(value: int) -> dict[str, object]:
    return {"value": value, "unit": "MB"}


AMD = [
    {"gpu": 0, "mem_usage": {"total_vram": _mib(196592), "used_vram": _mib(283)}},
    {"gpu": 1, "mem_usage": {"total_vram": _mib(196592), "used_vram": _mib(9000)}},
]
ROCM = {
    "card1": {"VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "10960896"},
    "card0": {"VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "4096"},
    "system": {"Driver version": "6.7.0"},
}
NPU = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0.3                 Version: 24.1.0.3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 94.6        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3439 / 65536         |
+===========================+===============+====================================================+
| 7     Ascend910           | Warning       | -           36                0    / 0             |
| 1     15                  | 0000:83:00.0  | 0           1979 / 15039      61825/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 7       1                 | 4242          |                          | 37709                   |
| 7       1                 | 4243          | python3                  | 99                      |
+===========================+===============+====================================================+
"""
SMALL_NPU = """\
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
| 1       310P3                 | OK              | NA           51                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1605 / 44278                            |
"""


def test_amd_smi_is_read_in_both_of_its_shapes() -> None:
    """Its megabytes are 2**20 bytes: read as 10**6, 9 GB of a full card would be missing."""
    for said in (AMD, {"gpu_data": AMD}):
        first, second = amd_smi(json.dumps(said))
        assert (first.device, first.total_bytes, first.used_bytes) == ("gpu 0", 196592 * MIB, 283 * MIB)
        assert (second.device, second.used_bytes, second.by_pid) == ("gpu 1", 9000 * MIB, None)


def test_rocm_smi_is_read_by_the_cards_own_order() -> None:
    """Device 1 of the engine is card1, wherever it stands in the page."""
    used = [(use.device, use.used_bytes) for use in rocm_smi(json.dumps(ROCM))]
    assert used == [("card0", 4096), ("card1", 10960896)]


def test_npu_smi_is_read_chip_by_chip_with_its_processes() -> None:
    """HBM is what an engine fills; the memory beside it is the NPU's own, and a chip of two is a device of its own."""
    first, second = npu_smi(NPU)
    assert (first.device, first.used_bytes, first.total_bytes, first.by_pid) == (
        "npu 0 chip 0",
        3439 * MIB,
        65536 * MIB,
        {},
    )
    assert (second.device, second.used_bytes) == ("npu 7 chip 1", 61825 * MIB)
    assert second.by_pid == {4242: 37709 * MIB, 4243: 99 * MIB}
    (only,) = npu_smi(SMALL_NPU)
    assert (only.device, only.used_bytes, only.total_bytes) == ("npu 1 chip 0", 1605 * MIB, 44278 * MIB)


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, *, code: int = 0) -> None:
    """A tool that prints `text`, alone on the path."""
    (folder / "said").write_text(text)
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n/bin/cat {folder / 'said'}\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("shown", "num_devices", "used"),
    [
        ({}, 1, [283]),
        ({}, 2, [283, 9000]),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1, [9000]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, 2, [9000, 283]),
        ({"HIP_VISIBLE_DEVICES": "1"}, 2, None),
        ({"HIP_VISIBLE_DEVICES": "GPU-abc"}, 1, None),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, 1, None),
    ],
)
def test_the_devices_a_launch_is_shown_are_the_ones_that_are_read(
    shown: dict[str, str], num_devices: int, used: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbour's memory is no proof that ours came back: what cannot be mapped is unknown."""
    _install(tmp_path, monkeypatch, "amd-smi", json.dumps(AMD))
    tool = installed_tool()
    assert tool is not None
    reading = ask(tool, shown, num_devices)
    assert (None if reading is None else [use.used_bytes // MIB for use in reading]) == used


@pytest.mark.parametrize(
    "text", ["", "not JSON", "{}", "[]", "[3]", "[{}]", json.dumps([{"gpu": 0, "mem_usage": "N/A"}])]
)
def test_what_is_not_its_format_is_unknown(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool of another version, or one without a driver, must not read as an empty device."""
    _install(tmp_path, monkeypatch, "amd-smi", text)
    assert ask(TOOLS[0], {}, 1) is None


def test_a_tool_that_fails_or_is_not_there_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tool only the engine's own account is left, and the record says that the device's is unknown."""
    _install(tmp_path, monkeypatch, "npu-smi", NPU, code=1)
    assert installed_tool() == TOOLS[2]
    assert ask(TOOLS[2], {}, 1) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert installed_tool() is None
    assert ask(TOOLS[2], {}, 1) is None


def test_a_pid_of_another_namespace_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the host's pids are not ours to tell apart; one that lives here is."""
    _install(tmp_path, monkeypatch, "npu-smi", NPU.replace("4242", str(os.getpid())).replace("4243", str(os.getppid())))
    reading = ask(TOOLS[2], {"ASCEND_RT_VISIBLE_DEVICES": "1"}, 1)
    assert reading is not None
    assert reading[0].by_pid == {os.getpid(): 37709 * MIB, os.getppid(): 99 * MIB}
    _install(tmp_path, monkeypatch, "npu-smi", NPU.replace("4242", "4194305"))
    other = ask(TOOLS[2], {"ASCEND_RT_VISIBLE_DEVICES": "1"}, 1)
    assert other is not None
    assert other[0].by_pid is None
