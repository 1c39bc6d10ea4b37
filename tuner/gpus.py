"""Which GPUs a process here may use, asked of the driver's own tool; a machine without one has none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
"""What shows a process some of the GPUs, by number or UUID and in that order; unset shows it all, empty none."""

_GPU = re.compile(r"^GPU (?P<number>\d+): .*\(UUID: (?P<uuid>\S+)\)", re.MULTILINE)
_MIG = re.compile(r"^\s+MIG .*\(UUID: (?P<uuid>\S+)\)", re.MULTILINE)
_LISTING_TIMEOUT_S = 30.0


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names of the GPUs that a process with this environment may use, as `CUDA_VISIBLE_DEVICES` would name them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=_LISTING_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return shown_gpus(listing.stdout, environment.get(VARIABLE))


def described_gpus(environment: Mapping[str, str] = os.environ) -> str | None:
    """Name and memory of the GPUs that a process with this environment may use, each kind once; None without any."""
    tool, names = shutil.which("nvidia-smi"), visible_gpus(environment)
    if tool is None or not names:
        return None
    query = [tool, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=_LISTING_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return kinds_of(listing.stdout, names)


def kinds_of(listing: str, names: Sequence[str]) -> str | None:
    """The kinds of those GPUs, in the order of the listing; None where it has none of them.

    Args:
        listing: `index, uuid, name, MiB`, a line a GPU.
        names: by number or by the beginning of the UUID.
    """
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines()]
    kinds = [
        f"{row[2]}, {int(row[3]) / 1024:.0f} GiB"
        for row in rows
        if len(row) == 4 and row[3].isdecimal() and any(name == row[0] or row[1].startswith(name) for name in names)
    ]
    return " and ".join(dict.fromkeys(kinds)) or None


def shown_gpus(listing: str, shown: str | None) -> tuple[str, ...]:
    """Which of the GPUs in a listing of `nvidia-smi -L` are shown. As CUDA does, the first unknown name ends the list.

    Args:
        listing: a line a GPU; below one that is divided, a line an instance.
        shown: the value of `CUDA_VISIBLE_DEVICES`; None where it is not set.
    """
    numbers = {found["number"] for found in _GPU.finditer(listing)}
    uuids = [found["uuid"] for pattern in (_GPU, _MIG) for found in pattern.finditer(listing)]
    if shown is None:
        return tuple(sorted(numbers, key=int))
    known: list[str] = []
    for name in (each.strip() for each in shown.split(",")):
        if name not in numbers and not (name and any(uuid.startswith(name) for uuid in uuids)):
            break
        known.append(name)
    return tuple(known)
