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
_A_GPU_EACH = re.compile(r"^(?=GPU )", re.MULTILINE)
_LISTING_TIMEOUT_S = 30.0


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names of the GPUs that a process with this environment may use, as `CUDA_VISIBLE_DEVICES` would name them."""
    return shown_gpus(_asked("-L") or "", environment.get(VARIABLE))


def why_unusable(environment: Mapping[str, str] = os.environ, *, devices_per_trial: int) -> str | None:
    """Why trials cannot have GPUs of their own here, and the way out; None where they can."""
    return instances_in_the_way(_asked("-L") or "", environment.get(VARIABLE), devices_per_trial=devices_per_trial)


def same_for_all(names: Sequence[str]) -> tuple[str, ...]:
    """One name for each of these GPUs, whoever asks: its UUID, where the driver's tool tells."""
    return uuids_of(_asked("-L") or "", names)


def described_gpus(environment: Mapping[str, str] = os.environ) -> str | None:
    """Name and memory of the GPUs that a process with this environment may use, each kind once; None without any."""
    names = visible_gpus(environment)
    listing = _asked("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits") if names else None
    return None if listing is None else kinds_of(listing, names)


def _asked(*arguments: str) -> str | None:
    """What the driver's tool answers; None where there is none, or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, *arguments], capture_output=True, text=True, timeout=_LISTING_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


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


def instances_in_the_way(listing: str, shown: str | None, *, devices_per_trial: int) -> str | None:
    """Why instances of a divided GPU (MIG) cannot be used as they are shown; None where they can, or there are none.

    A process takes one instance and no more, and where none is named CUDA gives everybody the first.

    Args:
        listing: as of `shown_gpus`.
        shown: as of `shown_gpus`.
        devices_per_trial: how many a launch takes.
    """
    if shown is None and _MIG.search(listing):
        whole = [part for part in _A_GPU_EACH.split(listing) if _GPU.match(part)]
        names = [name for part in whole for name in _MIG.findall(part) or [_GPU.findall(part)[0][1]]]
        return (
            "a GPU here is divided into instances (MIG), of which CUDA would give every trial the first: name those to "
            f"use, as in {VARIABLE}={','.join(names)}"
        )
    if devices_per_trial > 1 and any(name.startswith("MIG-") for name in shown_gpus(listing, shown)):
        return (
            f"a launch of this job takes {devices_per_trial} GPUs, and a process can use one instance of a divided GPU "
            f"(MIG) alone: lower that to 1, or name whole GPUs in {VARIABLE}"
        )
    return None


def uuids_of(listing: str, names: Sequence[str]) -> tuple[str, ...]:
    """Each GPU's whole UUID by its number or the beginning of it; a name that is not in the listing stays."""
    by_number = {found["number"]: found["uuid"] for found in _GPU.finditer(listing)}
    uuids = [found["uuid"] for pattern in (_GPU, _MIG) for found in pattern.finditer(listing)]
    return tuple(
        by_number.get(name) or next((uuid for uuid in uuids if name and uuid.startswith(name)), name) for name in names
    )
