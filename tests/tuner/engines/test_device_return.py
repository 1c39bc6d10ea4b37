"""Whether a device is free again, and whose fault a start was, on figures alone."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engines.device_return import (
    OTHERS_BYTES,
    TOLERANCE_BYTES,
    NotFree,
    available_bytes,
    device_full,
    is_free,
    others_changed_bytes,
    read_reading,
    unless_disturbed,
    write_reading,
)
from tuner.engines.device_use import DeviceUse
from tuner.records import Failed, FailureKind

GIB = 2**30
sizes = st.integers(0, 80 * GIB)
holdings = st.none() | st.dictionaries(st.integers(1, 4), sizes, max_size=4)


def _use(used: float, by_pid: dict[int, int] | None = None, *, device: str = "GPU-a") -> DeviceUse:
    return DeviceUse(device=device, total_bytes=80 * GIB, used_bytes=round(used), by_pid=by_pid)


@given(before=sizes, left=st.integers(-GIB, GIB))
def test_a_device_is_free_again_within_300_mib_of_what_it_was(before: int, left: int) -> None:
    """The next launch never meets what the last one left; a driver's own context keeps nobody off."""
    found = device_full((_use(before),), (_use(before + left),))
    assert (found is not None) == (left > TOLERANCE_BYTES)
    if found is not None:
        for told in ("GPU-a", f"{left} bytes", "kneetune clean", "nvidia-smi"):
            assert told in found.text


@pytest.mark.parametrize(
    ("before", "after", "device"),
    [
        ((), (), None),
        (None, None, None),
        (None, (_use(9 * GIB),), None),
        ((_use(GIB),), None, "GPU-a"),
        ((_use(GIB), _use(GIB, device="GPU-b")), (_use(GIB), _use(2 * GIB, device="GPU-b")), "GPU-b"),
        ((_use(GIB, {7: GIB}),), (_use(5 * GIB, {7: 5 * GIB}),), None),  # a neighbour grew
        ((_use(GIB, {}),), (_use(5 * GIB, {8: 4 * GIB}),), None),  # one came
        ((_use(5 * GIB, {7: 4 * GIB}),), (_use(5 * GIB, {}),), "GPU-a"),  # one left, and ours stayed in its place
        ((_use(GIB, {}),), (_use(5 * GIB, None),), "GPU-a"),  # who it is cannot be seen
    ],
)
def test_unknown_is_no_pass_and_a_neighbour_is_no_leftover(
    before: tuple[DeviceUse, ...] | None, after: tuple[DeviceUse, ...] | None, device: str | None
) -> None:
    """A job ends neither for a neighbour that can be seen, nor goes on where nothing can be seen any more."""
    found = device_full(before, after)
    assert (None if found is None else found.device) == device


@pytest.mark.parametrize("before", [(), (_use(GIB),)])
def test_a_process_that_cannot_be_killed_keeps_its_device(before: tuple[DeviceUse, ...]) -> None:
    """On a CPU too nothing is measured beside an engine that is still there."""
    found = device_full(before, before, ours=[12])
    assert found is not None
    assert "12" in found.text


@given(before=sizes, after=sizes, seen_before=holdings, seen_after=holdings)
def test_what_others_changed_is_seen_whoever_did_it_and_the_same_backwards(
    before: int, after: int, seen_before: dict[int, int] | None, seen_after: dict[int, int] | None
) -> None:
    """Two that swap places, one up, one down, are a change; one that frees is as good a reason as one that takes."""
    earlier, later = (_use(before, seen_before),), (_use(after, seen_after),)
    changed = others_changed_bytes(earlier, later)
    assert changed is not None
    assert changed == others_changed_bytes(later, earlier)
    if seen_before is not None and seen_after is not None:
        for pid in seen_before.keys() | seen_after.keys():
            assert changed >= abs(seen_after.get(pid, 0) - seen_before.get(pid, 0))
    else:
        assert changed == abs(after - before)


@pytest.mark.parametrize(
    ("kind", "after", "told"),
    [
        (FailureKind.OOM_STARTUP, (_use(GIB + OTHERS_BYTES + 1),), FailureKind.INFRASTRUCTURE),
        (FailureKind.OOM_STARTUP, (_use(GIB + OTHERS_BYTES),), FailureKind.OOM_STARTUP),
        (FailureKind.CRASHED, (_use(0),), FailureKind.INFRASTRUCTURE),  # a neighbour freed memory while it was profiled
        (FailureKind.NO_KV_MEMORY, (_use(9 * GIB, {7: 8 * GIB}),), FailureKind.INFRASTRUCTURE),
        (FailureKind.INVALID_CONFIG, (_use(9 * GIB),), FailureKind.INVALID_CONFIG),
        (FailureKind.OOM_STARTUP, None, FailureKind.OOM_STARTUP),
        (FailureKind.OOM_STARTUP, (_use(GIB),), FailureKind.OOM_STARTUP),
    ],
)
def test_a_setting_is_not_condemned_for_what_a_neighbour_took(
    kind: FailureKind, after: tuple[DeviceUse, ...] | None, told: FailureKind
) -> None:
    """Where others changed more than half a GiB during a start that failed, it is tried again; else it counts."""
    failed = Failed(kind=kind, detail="out of memory")
    found = unless_disturbed(failed, (_use(GIB, {}),), after)
    assert found.kind is told
    assert "out of memory" in found.detail
    assert (found == failed) == (told is kind)


def test_on_a_cpu_no_neighbour_is_read_into_a_failure() -> None:
    """Where nothing is read nothing is excused."""
    failed = Failed(kind=FailureKind.OOM_STARTUP, detail="out of memory")
    assert unless_disturbed(failed, (), ()) == failed


@pytest.mark.parametrize(
    ("missing", "available", "alive", "is_enough"),
    [
        (NotFree(requested_bytes=4 * GIB), 4 * GIB, set(), True),
        (NotFree(requested_bytes=4 * GIB), 4 * GIB - 1, set(), False),
        (NotFree(requested_bytes=4 * GIB), None, set(), False),
        (NotFree(requested_bytes=GIB, holders=(7, 8)), 9 * GIB, {7, 8}, False),
        (NotFree(requested_bytes=GIB, holders=(7, 8)), 9 * GIB, {8}, True),
        (NotFree(requested_bytes=GIB, holders=(7, 8)), GIB - 1, {8}, False),
    ],
)
def test_a_start_is_tried_again_when_what_it_was_short_of_is_free(
    missing: NotFree, available: int | None, alive: set[int], *, is_enough: bool
) -> None:
    """Three tries in one second against the same neighbour teach nothing."""
    assert is_free(missing, available_bytes=available, is_alive=alive.__contains__) is is_enough


def test_what_is_available_is_the_fullest_devices_or_the_machines() -> None:
    """A launch on two cards needs its share of both."""
    assert available_bytes((_use(70 * GIB), _use(30 * GIB, device="GPU-b"))) == 10 * GIB
    assert available_bytes(None) is None
    assert 0 < (available_bytes(()) or 0) <= psutil.virtual_memory().total


def test_a_baseline_outlives_the_process_that_read_it(tmp_path: Path) -> None:
    """After a worker was killed its device is judged by what it was before, not by what the dead left in it."""
    assert read_reading(tmp_path) == ()
    write_reading(tmp_path, None)
    assert read_reading(tmp_path) == ()
    write_reading(tmp_path, (_use(GIB, {7: GIB}), _use(2 * GIB)))
    assert read_reading(tmp_path) == (_use(GIB, {7: GIB}), _use(2 * GIB))
    (tmp_path / "device_memory.json").write_text('[{"device":')
    assert read_reading(tmp_path) == ()
