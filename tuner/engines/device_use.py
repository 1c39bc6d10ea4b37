"""One look at a device's memory, whoever tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from tuner.frozen import Record


class DeviceUse(Record):
    """One device's memory (or one MIG instance's) at one moment."""

    device: str
    """Its name, by which the vendor's tool knows it: of an NVIDIA GPU the UUID."""

    total_bytes: int
    used_bytes: int
    by_pid: Mapping[int, int] | None
    """What each process holds, where the driver says so of all it names; empty where it names none, as in a container.
    Unit: bytes."""


Reading: TypeAlias = tuple[DeviceUse, ...] | None
"""One look at every device of a launch; empty on a CPU (not applicable), None where it is unknown."""
