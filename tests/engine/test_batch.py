"""A step's tensors on their way to a device."""

from __future__ import annotations

import torch

from engine.batch import BatchBuffers
from engine.request import SamplingParams
from engine.step import ScheduledRequest, StepPlan


class _Copies:
    """Stands for a stream of copies: notes what the host array held when it was waited for, and when it was told."""

    def __init__(self, buffers: BatchBuffers) -> None:
        self.buffers = buffers
        self.seen: list[tuple[str, int]] = []

    def synchronize(self) -> None:
        """Wait for the copies."""
        self.seen.append(("wait", int(self.buffers._token_ids.array[0])))

    def record(self) -> None:
        """Note where the copies are in the stream."""
        self.seen.append(("sent", int(self.buffers._token_ids.array[0])))


def _plan(token: int) -> StepPlan:
    tokens = ScheduledRequest(
        request_id="r",
        token_ids=(token,),
        start=0,
        block_ids=(0,),
        samples=False,
        output_index=0,
        sampling=SamplingParams(max_tokens=1),
    )
    return StepPlan(scheduled=(tokens,))


def test_nothing_is_overwritten_before_it_has_left_the_host() -> None:
    """Copies to a GPU run on by themselves: a chunk of a prompt would be computed on the next step's tokens."""
    buffers = BatchBuffers(
        max_num_seqs=2, max_num_batched_tokens=4, max_model_len=8, block_size=4, device=torch.device("cpu")
    )
    copies = _Copies(buffers)
    buffers._sent = copies  # type: ignore[assignment]

    buffers.fill(_plan(7))
    buffers.fill(_plan(9))

    assert copies.seen == [("wait", 0), ("sent", 7), ("wait", 7), ("sent", 9)]
