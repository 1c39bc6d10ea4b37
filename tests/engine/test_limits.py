"""Limits of cgroups, as files of both versions say them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.limits import Limits, Ram, cpu_quota, memory_limit, oom_kills, read_limits, read_ram

_V1 = "9:name=systemd:/\n4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n"


def tree(root: Path, files: dict[str, str], membership: str) -> dict[str, Path]:
    """A made-up /sys/fs/cgroup and /proc/self/cgroup."""
    for name, text in files.items():
        path = root / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    own = root / "cgroup"
    own.write_text(membership, encoding="utf-8")
    return {"root": root / "fs", "membership": own}


@pytest.mark.parametrize(
    ("text", "limit"), [("max\n", None), ("4294967296\n", 2**32), ("9223372036854771712\n", None), ("0", 0)]
)
def test_memory_limit(text: str, limit: int | None) -> None:
    """Both ways to say `no limit` are no limit, not a device of eight exabytes."""
    assert memory_limit(text) == limit


@pytest.mark.parametrize(
    ("quota", "period", "cpus"),
    [("max", "100000", None), ("-1\n", "100000\n", None), ("150000", "100000", 1.5), ("50000", "100000", 0.5)],
)
def test_cpu_quota(quota: str, period: str, cpus: float | None) -> None:
    """A quota is CPU time a period, in CPUs."""
    assert cpu_quota(quota, period) == cpus


def test_no_files_are_no_limit(tmp_path: Path) -> None:
    """A machine without cgroups serves as before."""
    missing = tmp_path / "missing"
    assert read_limits(root=missing, membership=missing) == Limits(memory_bytes=None, cpus=None)
    assert oom_kills(root=missing, membership=missing) is None


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    """A slice above the service may be tighter than the service's own."""
    files = {"a/b/memory.max": "max", "a/memory.max": "4096", "a/b/cpu.max": "200000 100000", "a/cpu.max": "max 100000"}
    files |= {"a/b/memory.events": "low 0\noom 3\noom_kill 2\n", "a/memory.events": "oom_kill 7\n"}
    where = tree(tmp_path, files, "0::/a/b\n")
    assert read_limits(**where) == Limits(memory_bytes=4096, cpus=2.0)
    assert oom_kills(**where) == 2


def test_a_container_of_version_1_sees_its_limits_at_the_mount(tmp_path: Path) -> None:
    """There the path in /proc is the host's and does not exist inside."""
    files = {"memory/memory.limit_in_bytes": "4096", "memory/memory.oom_control": "under_oom 0\noom_kill 1\n"}
    files |= {"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    where = tree(tmp_path, files, _V1)
    assert read_limits(**where) == Limits(memory_bytes=4096, cpus=2.5)
    assert oom_kills(**where) == 1


def test_the_machines_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    """A share of less, or of what caches hold, is a model that does not fit where it would."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "MemTotal:       24528 kB\nMemFree:         1000 kB\nMemAvailable:   20000 kB\nHugePages_Total:  0\n"
    )
    assert read_ram(meminfo=meminfo) == Ram(total_bytes=24528 * 1024, available_bytes=20000 * 1024)
    assert read_ram().total_bytes == psutil.virtual_memory().total
