"""What a kernel is shipped as: one dtype, one tile, ready to be compiled for a chip that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TRITON_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}
"""Names of dtypes in a signature; a pointer has a `*` in front."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HEAD_SIZES = (64, 80, 128, 256)
"""What models have: Qwen and Llama 64 and 128, Phi 80, Gemma 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel with everything that is fixed when it is compiled."""

    name: str
    """Kernel, dtypes and tile, as a table names it."""

    kernel: Any
    """A `triton.JITFunction`."""

    signature: Mapping[str, str]
    """Type of each argument that is not fixed; the others are in `constants`."""

    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 2


def pointer(dtype: torch.dtype) -> str:
    """The type of a tensor argument."""
    return f"*{TRITON_TYPES[dtype]}"
