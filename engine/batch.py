"""`StepPlan` to tensors, through buffers that are allocated once and reused by every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionInputs
from engine.step import ScheduledRequest, StepPlan

_ROWS_AT_ONCE = 1024


class StagedBuffer:
    """A host array to write into and its tensor on the device; on CPU both are the same memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        self.array = self._host.numpy()
        self.nbytes = self._device.nbytes

    def on_device(self, *sizes: int) -> Tensor:
        """The leading corner of these sizes, on the device, holding what was sent last."""
        return self._device[tuple(slice(size) for size in sizes)]

    def send(self, *sizes: int) -> Tensor:
        """The leading corner of these sizes, on the device, holding what the host array holds."""
        device = self.on_device(*sizes)
        if self._device is not self._host:
            device.copy_(self._host[tuple(slice(size) for size in sizes)], non_blocking=True)
        return device


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step as tensors, T tokens. Valid until the next `fill` of its buffers.

    Requests come sorted by what they compute and then by their context, so that attention pads little; within a
    request the tokens are in order.
    """

    token_ids: Tensor
    """(T,) int64."""

    positions: Tensor
    """(T,) int64."""

    attention: AttentionInputs
    sampled_rows: Tensor
    """(rows,) int64: the tokens whose hidden state a next token is drawn from."""

    sampled: tuple[ScheduledRequest, ...]
    """The requests those rows belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """What a captured decode step reads; whatever the buffers hold when it runs."""

    token_ids: Tensor
    """(rows,) int64."""

    positions: Tensor
    """(rows,) int64."""

    attention: AttentionInputs
    """With block tables as wide as the buffer: what is beyond a request's own blocks is not read."""


class BatchBuffers:
    """Everything a step sends to the device but weights and KV: the request buffers, sized for the largest step."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        tokens, columns = (max_num_batched_tokens,), -(-max_model_len // block_size)
        self._token_ids = StagedBuffer(tokens, torch.int64, device)
        self._positions = StagedBuffer(tokens, torch.int64, device)
        self._slots = StagedBuffer(tokens, torch.int64, device)
        self._block_tables = StagedBuffer((max_num_seqs, columns), torch.int32, device)
        self._context_lens = StagedBuffer((max_num_seqs,), torch.int32, device)
        self._query_starts = StagedBuffer((max_num_seqs + 1,), torch.int32, device)
        self._sampled_rows = StagedBuffer((max_num_seqs,), torch.int64, device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Bytes these buffers take on the device."""
        return sum(buffer.nbytes for buffer in vars(self).values() if isinstance(buffer, StagedBuffer))

    def decodes(self, num_rows: int) -> DecodeInputs:
        """What a step of so many rows of one token reads: the places that `fill` writes, at addresses that stay."""
        return DecodeInputs(
            token_ids=self._token_ids.on_device(num_rows),
            positions=self._positions.on_device(num_rows),
            attention=AttentionInputs(
                slots=self._slots.on_device(num_rows),
                block_tables=self._block_tables.on_device(num_rows),
                context_lens=self._context_lens.on_device(num_rows),
                query_starts=self._query_starts.on_device(num_rows + 1),
            ),
        )

    def fill(self, plan: StepPlan, *, num_rows: int = 0) -> Batch:
        """Lay a plan out as tensors; the previous batch's are overwritten.

        Args:
            num_rows: a plan of fewer requests is padded with its first in this order, which then computes and writes
                the same once more.
        """
        if self._sent is not None:
            # A step that samples nothing waits for nothing: its copies may not have left the host yet.
            self._sent.synchronize()
        scheduled = sorted(plan.scheduled, key=lambda item: (len(item.token_ids), item.start))
        padding = max(0, num_rows - len(scheduled))
        scheduled = [scheduled[0]] * padding + scheduled
        num_requests, num_tokens = len(scheduled), sum(len(item.token_ids) for item in scheduled)
        lens = np.fromiter((len(item.token_ids) for item in scheduled), np.int64, num_requests)
        starts = np.fromiter((item.start for item in scheduled), np.int64, num_requests)
        query_starts = self._query_starts.array[: num_requests + 1]
        query_starts[0] = 0
        np.cumsum(lens, out=query_starts[1:])
        self._context_lens.array[:num_requests] = starts + lens
        columns = self._fill_block_tables(scheduled)
        rows = np.repeat(np.arange(num_requests), lens)
        positions = self._positions.array[:num_tokens]
        np.add(np.arange(num_tokens), (starts - query_starts[:-1])[rows], out=positions)
        blocks = self._block_tables.array[rows, positions // self._block_size].astype(np.int64)
        self._slots.array[:num_tokens] = blocks * self._block_size + positions % self._block_size
        ids = chain.from_iterable(item.token_ids for item in scheduled)
        self._token_ids.array[:num_tokens] = np.fromiter(ids, np.int64, num_tokens)
        sampling = [index for index, item in enumerate(scheduled) if item.samples and index >= padding]
        self._sampled_rows.array[: len(sampling)] = query_starts[1:][sampling] - 1
        batch = Batch(
            token_ids=self._token_ids.send(num_tokens),
            positions=self._positions.send(num_tokens),
            attention=AttentionInputs(
                slots=self._slots.send(num_tokens),
                block_tables=self._block_tables.send(num_requests, columns),
                context_lens=self._context_lens.send(num_requests),
                query_starts=self._query_starts.send(num_requests + 1),
            ),
            sampled_rows=self._sampled_rows.send(len(sampling)),
            sampled=tuple(scheduled[index] for index in sampling),
        )
        if self._sent is not None:
            self._sent.record()
        return batch

    def _fill_block_tables(self, scheduled: Sequence[ScheduledRequest]) -> int:
        """Write each request's block ids into its row; returns the columns in use. What is beyond is never read."""
        counts = np.fromiter((len(item.block_ids) for item in scheduled), np.int64, len(scheduled))
        columns = int(counts.max())
        # Some rows at a time: all of a large step would be laid out twice more on the way.
        for first in range(0, len(scheduled), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            ids = chain.from_iterable(item.block_ids for item in scheduled[rows])
            filled = np.arange(columns) < counts[rows, None]
            self._block_tables.array[: len(scheduled), :columns][rows][filled] = np.fromiter(
                ids, np.int32, int(counts[rows].sum())
            )
        return columns
