"""Whoever calls an op cannot tell what computes it: but for the device, all are one."""

from __future__ import annotations

import inspect

import pytest
import torch

from kernels import dispatch, reference

OPS = (
    *("rms_norm", "add_rms_norm", "rotary_embedding", "silu_mul", "gelu_tanh_mul"),
    *("kv_write", "paged_attention", "sample", "sample_likely"),
)


@pytest.mark.parametrize("name", OPS)
def test_all_have_one_signature(name: str) -> None:
    """Arguments in another order would be a wrong number without an error, and on a GPU only."""
    signatures = {str(inspect.signature(getattr(ops, name))) for ops in (dispatch, reference, dispatch._triton())}

    assert len(signatures) == 1


def test_a_cpu_takes_the_reference() -> None:
    """The tensor decides, and nothing else on the machine."""
    assert dispatch._ops(torch.empty(0)) is reference
