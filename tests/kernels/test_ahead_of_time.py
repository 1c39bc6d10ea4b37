"""Kernels compile for chips that are not here; in a process of its own, as the one here interprets them."""

from __future__ import annotations

import subprocess
import sys

import kernels

LOOK = """
from kernels import kv_write, paged_attention, rms_norm, rope, sample, silu_mul
from kernels.ahead_of_time import CHIPS, compiled
for module in (kv_write, paged_attention, rms_norm, rope, sample, silu_mul):
    for chip in CHIPS[1:]:
        taken = compiled(next(iter(module.shipped())), chip)
        assert 8 <= taken.registers <= 255, taken
        assert taken.spilled_bytes == 0, taken
        assert taken.shared_bytes <= chip.shared_bytes, taken
        print(module.__name__, chip.name)
"""


def test_each_kernel_compiles_for_a_chip_of_either_maker_without_spilling() -> None:
    """What only a GPU's owner would find out: a kernel that does not compile, or crawls for want of registers."""
    done = subprocess.run([sys.executable, "-c", LOOK], check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6 * 2


def test_the_kernels_are_ours() -> None:
    """Hugging Face has a package of the same name, which its transformers looks for."""
    assert kernels.__doc__ is not None
    assert "engine computes with" in kernels.__doc__
