"""The GPUs a job may use are those CUDA would give it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tuner.gpus import instances_in_the_way, kinds_of, shown_gpus, uuids_of, visible_gpus

LISTING = """\
GPU 0: NVIDIA L4 (UUID: GPU-aaaa1111-0000)
GPU 1: NVIDIA L4 (UUID: GPU-bbbb2222-0000)
GPU 2: NVIDIA H100 (UUID: GPU-cccc3333-0000)
  MIG 1g.10gb     Device  0: (UUID: MIG-dddd4444)
"""


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("2,0", ("2", "0")),
        ("GPU-bbbb, 1", ("GPU-bbbb", "1")),
        ("MIG-dddd4444", ("MIG-dddd4444",)),
        ("0,7,1", ("0",)),
        ("-1", ()),
        ("NoDevFiles", ()),
    ],
)
def test_the_variable_hides_gpus_as_cuda_reads_it(shown: str | None, expected: tuple[str, ...]) -> None:
    """A GPU counted that CUDA does not show is a trial that waits for ever, or falls back to the CPU."""
    assert shown_gpus(LISTING, shown) == expected


def test_the_drivers_tool_is_asked_and_a_machine_without_it_has_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop is no error; a tool that fails is no GPU."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == ()
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{LISTING}'\n", encoding="utf-8")
    tool.chmod(0o755)
    assert visible_gpus({}) == ("0", "1", "2")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == ("1",)
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert visible_gpus(os.environ) == ()


def test_a_machine_is_named_by_the_kinds_of_gpu_it_shows() -> None:
    """A run says on which card its figures hold; hidden cards have no part in it."""
    listing = "0, GPU-aa, NVIDIA H200, 143771\n1, GPU-bb, NVIDIA H200, 143771\n2, GPU-cc, NVIDIA L4, 23034\n"
    assert kinds_of(listing, ["0", "1"]) == "NVIDIA H200, 140 GiB"
    assert kinds_of(listing, ["GPU-b", "2"]) == "NVIDIA H200, 140 GiB and NVIDIA L4, 22 GiB"
    assert kinds_of("[N/A]", ["0"]) is None


def test_instances_that_nobody_named_are_refused_with_their_names() -> None:
    """CUDA gives every process the first instance: trials at once would measure each other, and say nothing of it."""
    why = instances_in_the_way(LISTING, None, devices_per_trial=1)
    assert why is not None
    assert "CUDA_VISIBLE_DEVICES=GPU-aaaa1111-0000,GPU-bbbb2222-0000,MIG-dddd4444" in why
    assert instances_in_the_way(LISTING, "MIG-dddd4444,0", devices_per_trial=1) is None
    assert instances_in_the_way(LISTING.partition("  MIG")[0], None, devices_per_trial=2) is None


def test_no_engine_is_launched_over_several_instances() -> None:
    """It would fail in its first collective, minutes later and in other words."""
    why = instances_in_the_way(LISTING, "MIG-dddd4444,0", devices_per_trial=2)
    assert why is not None
    assert "takes 2 GPUs" in why
    assert instances_in_the_way(LISTING, "0,1", devices_per_trial=2) is None


def test_a_gpu_has_one_name_for_all_jobs() -> None:
    """Two jobs that call one GPU by its number and by its UUID would both have it to themselves."""
    assert uuids_of(LISTING, ["0", "GPU-aaaa", "GPU-aaaa1111-0000"]) == ("GPU-aaaa1111-0000",) * 3
    assert uuids_of(LISTING, ["MIG-dddd", "2"]) == ("MIG-dddd4444", "GPU-cccc3333-0000")
    assert uuids_of("", ["0", "7"]) == ("0", "7")
