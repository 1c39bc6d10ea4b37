"""The batch sizes of decode steps that graphs are captured for. Pure."""

from __future__ import annotations


def graph_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, multiples of 8 up to 256 and of 16 up to 512, none above `most` requests.

    (vLLM: the default list of `vllm/config/vllm.py`, `_set_cudagraph_sizes`, of which `vllm/v1/cudagraph_dispatcher.py`
    takes for decodes those up to `max_num_seqs`.)
    """
    grid = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    return tuple(size for size in grid if size <= most)
