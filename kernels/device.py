"""What a launcher wants to know of the chip."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SMS_WITHOUT_A_GPU = 1
"""Where kernels are interpreted on a CPU."""


def num_sms(tensor: Tensor) -> int:
    """Streaming multiprocessors of the device that holds it."""
    return _num_sms(tensor.device.index) if tensor.is_cuda else SMS_WITHOUT_A_GPU


@cache
def _num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
