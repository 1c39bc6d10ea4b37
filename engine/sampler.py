"""From logits to the next tokens: greedy or by temperature, repeatable per request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch import StagedBuffer
from engine.step import ScheduledRequest
from kernels.reference import sample

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by less overflows float32 (vLLM: `_SAMPLING_EPS`)."""


class Sampler:
    """Draws one token a row.

    With a seed, the draw of a request's k-th output is a function of (seed, k) and its logits: the batch, chunking
    and preemption do not matter. Without one it comes from this sampler's own generator, in the order of the rows.
    """

    def __init__(self, *, seed: int, max_num_seqs: int, device: torch.device) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._temperatures = StagedBuffer((max_num_seqs,), torch.float32, device)
        self._uniforms = StagedBuffer((max_num_seqs,), torch.float64, device)

    @property
    def nbytes(self) -> int:
        """Bytes of this sampler's buffers on the device."""
        return self._temperatures.nbytes + self._uniforms.nbytes

    def draw(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> list[int]:
        """One token id a row of `logits` (rows, vocabulary), row i for `requests[i]`."""
        if all(item.sampling.temperature < GREEDY_BELOW for item in requests):
            return logits.argmax(-1).tolist()
        for row, item in enumerate(requests):
            temperature = item.sampling.temperature
            greedy = temperature < GREEDY_BELOW
            self._temperatures.array[row] = 0.0 if greedy else temperature
            self._uniforms.array[row] = 0.0 if greedy else self._uniform(item)
        rows = len(requests)
        return sample(logits, self._temperatures.send(rows), self._uniforms.send(rows)).tolist()

    def _uniform(self, item: ScheduledRequest) -> float:
        seed = item.sampling.seed
        if seed is None:
            return self._generator.random()
        return seeded_uniform(seed, item.output_index)


def seeded_uniform(seed: int, output_index: int) -> float:
    """A number in [0, 1) fixed by the pair: Philox with the seed as its key and the index as its counter."""
    return np.random.Generator(np.random.Philox(key=seed % 2**128, counter=output_index)).random()
