"""Compile kernels for a chip that is not there, and read what they take of it.

Registers, spills and shared memory decide how many programs share an SM, and whether a kernel can be launched at all.
Triton compiles for a named target without a driver; for NVIDIA `cuobjdump` of its own package tells what the result
takes, for AMD the assembly's own metadata (LLVM: AMDGPU usage, code object metadata).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.variants import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A target and its limits."""

    name: str
    target: GPUTarget
    shared_bytes: int
    """Shared memory that one program may take at the most (CUDA C programming guide, technical specifications; AMD
    Instinct MI300 instruction set architecture, local data share)."""

    may_spill: bool = False
    """Whether tiles were chosen for others, and it is enough that kernels run here."""


CHIPS = (
    Chip(name="sm_80", target=GPUTarget("cuda", 80, 32), shared_bytes=163 * 1024),
    Chip(name="sm_90", target=GPUTarget("cuda", 90, 32), shared_bytes=227 * 1024),
    Chip(name="gfx942", target=GPUTarget("hip", "gfx942", 64), shared_bytes=64 * 1024, may_spill=True),
)


MULTIPLES_OF_16 = frozenset(
    {
        *("x_outer_stride", "x_inner_stride", "residual_outer_stride", "residual_inner_stride", "row_size"),
        *("x_token_stride", "x_head_stride", "half", "token_stride", "size"),
        *("key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride"),
        *("query_token_stride", "query_head_stride", "cache_block_stride", "cache_slot_stride", "cache_head_stride"),
        *("block_size", "head_size"),
    }
)
"""Arguments that are such in a launch on a real model, as all addresses are: loads are as wide as that allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one compiled kernel takes of a chip."""

    registers: int
    """Of each thread."""

    spilled_bytes: int
    """Of each thread: memory, where registers did not suffice. AMD's scalars that go to vector registers are not."""

    shared_bytes: int
    """Of each program."""


def compiled(variant: Variant, chip: Chip) -> Taken:
    """Compile a variant for a chip.

    Raises:
        triton.errors.TritonError: where it cannot be compiled for it.
    """
    signature = dict(variant.signature) | dict.fromkeys(variant.constants, "constexpr")
    # In the order of the kernel's arguments, as Triton numbers them.
    signature = {name: signature[name] for name in variant.kernel.arg_names}
    aligned = [
        index for index, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in MULTIPLES_OF_16
    ]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(variant.kernel, signature, constexprs=dict(variant.constants), attrs=attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    kernel = triton.compile(source, target=chip.target, options=options)
    if chip.target.backend == "hip":
        registers, scratch_bytes = (_metadatum(name, kernel.asm["amdgcn"]) for name in _OF_A_THREAD)
        return Taken(registers=registers, spilled_bytes=scratch_bytes, shared_bytes=kernel.metadata.shared)
    usage = _resource_usage(kernel.asm["cubin"])
    return Taken(
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=kernel.metadata.shared,
    )


_OF_A_THREAD = ("vgpr_count", "private_segment_fixed_size")


def _metadatum(name: str, assembly: str) -> int:
    """A number of the only kernel of an AMD assembly."""
    (value,) = re.findall(rf"^\s*\.{name}:\s+(\d+)$", assembly, re.MULTILINE)
    return int(value)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """`REG`, `STACK`, `LOCAL` and more of the only kernel of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(Path(file.name))]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b([A-Z]+)(?:\[\d+\])?:(\d+)", told)}
    return {"REG": usage["REG"], "STACK": usage.get("STACK", 0), "LOCAL": usage.get("LOCAL", 0)}
