"""Decode steps from captured graphs: hundreds of kernels in one launch, which costs the host as much as one of them.

A graph has fixed shapes and addresses. So there is one for each of some batch sizes, it reads the buffers that every
step is laid out in, and a batch in between is padded to the next size. Steps with a chunk of a prompt, and batches
above the largest size, run kernel by kernel (vLLM: `vllm/v1/cudagraph_dispatcher.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from engine.config import OutOfDeviceMemoryError
from engine.step import StepPlan

Run: TypeAlias = Callable[[], Tensor]
"""Computes from fixed buffers into a tensor; replayed, into the same one."""

Capture: TypeAlias = Callable[[Run], Run]


class DecodeGraphs:
    """What replays the decode steps of some batch sizes."""

    def __init__(self, replays: Mapping[int, Run]) -> None:
        self._replays = replays
        self._sizes = sorted(replays)

    def size_for(self, plan: StepPlan) -> int | None:
        """The smallest captured size that holds this step; None where it is no pure decode, or too large."""
        num_requests = len(plan.scheduled)
        if plan.num_scheduled_tokens != num_requests:
            return None
        index = bisect_left(self._sizes, num_requests)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int) -> Tensor:
        """Hidden states of all rows, padding included; valid until the next replay."""
        return self._replays[size]()


class CudaCapture:
    """Captures runs, the largest first: they share one pool of memory, in which a smaller one finds room."""

    def __init__(self, device: torch.device) -> None:
        self.taken_bytes: list[int] = []
        """What each capture took of the device."""

        self._device = device
        self._pool: Any = None

    def __call__(self, run: Run) -> Run:
        """Capture one.

        Raises:
            OutOfDeviceMemoryError: `oom_graph_capture`.
        """
        try:
            graph, out, free_bytes = self._captured(run)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            raise OutOfDeviceMemoryError("oom_graph_capture", f"capturing a graph: {error}") from error
        self._pool = graph.pool()
        left_bytes, _ = torch.cuda.mem_get_info(self._device)
        self.taken_bytes.append(max(0, free_bytes - left_bytes))

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def _captured(self, run: Run) -> tuple[torch.cuda.CUDAGraph, Tensor, int]:
        """The graph, what it computes into, and the bytes that were free before."""
        run()  # compiles kernels and takes workspaces, which a capture may not
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()
        return graph, out, free_bytes
