"""From logits to the next tokens: penalties, temperature, cuts and the draw, repeatable per request.

The order is vLLM's (`vllm/v1/sample/sampler.py`): log-probabilities of the model's own scores, then no end before
`min_tokens`, penalties, temperature, min-p, top-k, top-p, and the draw. Each is done for the rows that ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.batch import StagedBuffer
from engine.request import SamplingParams
from engine.step import ScheduledRequest, StepResult, TokenLogprobs
from kernels.dispatch import sample, sample_likely
from kernels.reference import penalise

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by less overflows float32 (vLLM: `_SAMPLING_EPS`; there, those between 0
and 0.01 are raised to 0.01 first)."""


class Sampler:
    """Draws one token a row.

    With a seed, the draw of a request's k-th output is a function of (seed, k) and its logits: the batch, chunking
    and preemption do not matter. Without one it comes from this sampler's own generator.
    """

    def __init__(self, *, seed: int, max_num_seqs: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        size = (max_num_seqs,)
        self._rows = StagedBuffer(size, torch.int64, device)
        self._temperatures = StagedBuffer(size, torch.float32, device)
        self._uniforms = StagedBuffer(size, torch.float64, device)
        self._top_ks = StagedBuffer(size, torch.int64, device)
        self._top_ps = StagedBuffer(size, torch.float64, device)
        self._min_ps = StagedBuffer(size, torch.float32, device)

    @property
    def nbytes(self) -> int:
        """Bytes of this sampler's buffers on the device."""
        return sum(buffer.nbytes for buffer in vars(self).values() if isinstance(buffer, StagedBuffer))

    def draw(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> StepResult:
        """One token for each of `requests`, which belong to the rows of `logits`, in order.

        Args:
            logits: (rows, vocabulary) float32; may be overwritten.
            requests: one a row.
        """
        names = [item.request_id for item in requests]
        if all(_takes_the_best(item.sampling) for item in requests):
            return StepResult(sampled_token_ids=dict(zip(names, logits.argmax(-1).tolist(), strict=True)))
        reported = [row for row, item in enumerate(requests) if item.sampling.num_logprobs is not None]
        logprobs = logits[reported].log_softmax(-1)
        self._forbid_ends(logits, requests)
        self._penalise(logits, requests)
        drawn = self._choose(logits, requests)
        return StepResult(
            sampled_token_ids=dict(zip(names, drawn.tolist(), strict=True)),
            logprobs=_report(logprobs, drawn[reported], [requests[row] for row in reported]),
        )

    def _forbid_ends(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> None:
        """Make the end impossible for requests that have not reached `min_tokens`."""
        pairs = [
            (row, token_id)
            for row, item in enumerate(requests)
            if item.output_index < item.sampling.min_tokens
            for token_id in (*self._eos_token_ids, *item.sampling.stop_token_ids)
            if 0 <= token_id < logits.shape[1]
        ]
        if pairs:
            rows, tokens = torch.tensor(pairs, device=self._device).unbind(1)
            logits[rows, tokens] = -torch.inf

    def _penalise(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> None:
        """Lower the scores of tokens that requests with penalties have seen."""
        rows = [row for row, item in enumerate(requests) if item.sampling.has_penalties]
        if not rows:
            return
        seen_rows, seen_tokens, counts = _count_tokens(rows, requests, vocab_size=logits.shape[1])
        penalties = [
            (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            for params in (item.sampling for item in requests)
        ]
        repetition, presence, frequency = torch.tensor(penalties, device=self._device).unbind(1)
        penalise(
            logits,
            torch.from_numpy(seen_rows).to(self._device),
            torch.from_numpy(seen_tokens).to(self._device),
            torch.from_numpy(counts).to(self._device),
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )

    def _choose(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
        """(rows,) int64: the most likely token of greedy requests, a drawn one of the others."""
        drawing = [row for row, item in enumerate(requests) if not _is_greedy(item.sampling)]
        if not drawing:
            return logits.argmax(-1)
        # Requests whose distribution is cut come last.
        drawing.sort(key=lambda row: _has_cuts(requests[row].sampling))
        num_cut = sum(_has_cuts(requests[row].sampling) for row in drawing)
        whole, cut = slice(len(drawing) - num_cut), slice(len(drawing) - num_cut, None)
        rows, temperatures, uniforms = self._stage(drawing, requests)
        drawn = logits.argmax(-1) if len(drawing) < len(requests) else torch.empty_like(rows)
        if num_cut < len(drawing):
            drawn[rows[whole]] = sample(_select(logits, rows[whole]), temperatures[whole], uniforms[whole])
        if num_cut:
            drawn[rows[cut]] = sample_likely(
                _select(logits, rows[cut]),
                temperatures[cut],
                uniforms[cut],
                top_ks=self._top_ks.send(len(drawing))[cut],
                top_ps=self._top_ps.send(len(drawing))[cut],
                min_ps=self._min_ps.send(len(drawing))[cut],
            )
        return drawn

    def _stage(self, rows: Sequence[int], requests: Sequence[ScheduledRequest]) -> tuple[Tensor, Tensor, Tensor]:
        """Lay out what the draws of these rows need; returns the rows, temperatures and uniforms on the device."""
        for index, row in enumerate(rows):
            item = requests[row]
            params = item.sampling
            self._rows.array[index] = row
            self._temperatures.array[index] = params.temperature
            self._uniforms.array[index] = self._uniform(item)
            self._top_ks.array[index] = params.top_k
            self._top_ps.array[index] = params.top_p
            self._min_ps.array[index] = params.min_p
        count = len(rows)
        return self._rows.send(count), self._temperatures.send(count), self._uniforms.send(count)

    def _uniform(self, item: ScheduledRequest) -> float:
        seed = item.sampling.seed
        if seed is None:
            return self._generator.random()
        return seeded_uniform(seed, item.output_index)


def seeded_uniform(seed: int, output_index: int) -> float:
    """A number in [0, 1) fixed by the pair: Philox with the seed as its key and the index as its counter."""
    return np.random.Generator(np.random.Philox(key=seed % 2**128, counter=output_index)).random()


def _is_greedy(params: SamplingParams) -> bool:
    """The one likeliest token is the most likely one, with ties too."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1


def _takes_the_best(params: SamplingParams) -> bool:
    """Whether the highest score is all there is to find."""
    return _is_greedy(params) and params.num_logprobs is None and not params.min_tokens and not params.has_penalties


def _has_cuts(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _select(logits: Tensor, rows: Tensor) -> Tensor:
    """These rows of `logits`, without a copy where they are all of them."""
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


def _count_tokens(
    rows: Sequence[int], requests: Sequence[ScheduledRequest], *, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every (row, token) that was seen, once, and how often it was generated: int64, int64, float32."""
    outputs = _keys(rows, [requests[row].output_token_ids for row in rows], vocab_size)
    repeated = [row for row in rows if requests[row].sampling.repetition_penalty != 1.0]
    prompts = _keys(repeated, [requests[row].prompt_token_ids for row in repeated], vocab_size)
    keys, places = np.unique(np.concatenate((outputs, prompts)), return_inverse=True)
    counts = np.bincount(places[: len(outputs)], minlength=len(keys)).astype(np.float32)
    return keys // vocab_size, keys % vocab_size, counts


def _keys(rows: Sequence[int], token_ids: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Row and token of every token as one number."""
    lens = [len(ids) for ids in token_ids]
    tokens = np.fromiter(chain.from_iterable(token_ids), np.int64, sum(lens))
    return np.repeat(np.asarray(rows, np.int64) * vocab_size, lens) + tokens


def _report(logprobs: Tensor, drawn: Tensor, requests: Sequence[ScheduledRequest]) -> dict[str, TokenLogprobs]:
    """How likely the drawn tokens were, (R,), by their requests' rows of `logprobs`, (R, vocabulary)."""
    if not requests:
        return {}
    counts = [item.sampling.num_logprobs or 0 for item in requests]
    values, ids = logprobs.topk(min(max(counts), logprobs.shape[1]))
    of_drawn = logprobs.gather(1, drawn.unsqueeze(1)).squeeze(1)
    return {
        item.request_id: TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for item, count, logprob, ids, values in zip(
            requests, counts, of_drawn.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    }
