"""The sampling oracle against the formulas written out."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference import keep_likely, penalise, sample


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_sample_follows_the_distribution() -> None:
    """Uniforms spread evenly draw each token as often as its probability says."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000

    drawn = sample(logits.expand(10_000, -1), torch.full((10_000,), 2.0), uniforms)

    shares = torch.bincount(drawn, minlength=5) / 10_000
    torch.testing.assert_close(shares, (logits[0] / 2.0).softmax(0), atol=2e-4, rtol=0)


def test_sample_never_draws_the_impossible() -> None:
    """The ends of [0, 1) fall on tokens that have a probability."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]] * 2)

    drawn = sample(logits, torch.ones(2), torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64))

    assert drawn.tolist() == [1, 3]


@given(
    vocabulary=st.sampled_from([1, 31, 1024, 1025, 2500]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    top_ks=st.lists(st.sampled_from([0, 1, 5, 1024, 1025, 2000]), min_size=3, max_size=3),
    top_ps=st.lists(st.sampled_from([1.0, 0.9999, 0.7, 0.01]), min_size=3, max_size=3),
    min_ps=st.lists(st.sampled_from([0.0, 1e-4, 0.5, 1.0]), min_size=3, max_size=3),
)
def test_keep_likely_keeps_what_a_slow_reading_keeps(
    vocabulary: int, spread: float, top_ks: list[int], top_ps: list[float], min_ps: list[float]
) -> None:
    """A cut is exact in a flat distribution of thousands of tokens and in a peaked one, beside rows that cut less."""
    probs = (spread * _normal(3, vocabulary)).softmax(-1)
    kept = keep_likely(
        probs,
        top_ks=torch.tensor(top_ks),
        top_ps=torch.tensor(top_ps, dtype=torch.float64),
        min_ps=torch.tensor(min_ps),
    )
    for row, top_k, top_p, min_p, out in zip(probs, top_ks, top_ps, min_ps, kept, strict=True):
        ordered = row[row >= torch.tensor(min_p) * row.max()].double().sort(descending=True).values
        ordered = ordered[: top_k or vocabulary]
        cumulated = ordered.cumsum(0)
        above = torch.cat((torch.zeros(1), cumulated[:-1]))  # a token stays if what is likelier does not suffice
        floor = ordered[above < top_p * cumulated[-1]].min()

        # A token that the sum does not feel may stay or go.
        torch.testing.assert_close(out, torch.where(row >= floor, row, 0.0), atol=1e-15, rtol=0)


def test_a_nucleus_that_is_reached_exactly_takes_no_token_more() -> None:
    """The smallest set with at least this probability, and tokens as likely as its last."""
    probs = torch.tensor([[0.125, 0.5, 0.125, 0.25]])
    for top_p, kept in ((0.5, [1]), (0.75, [1, 3]), (0.76, [0, 1, 2, 3])):
        top_ps = torch.tensor([top_p], dtype=torch.float64)
        out = keep_likely(probs, top_ks=torch.tensor([0]), top_ps=top_ps, min_ps=torch.tensor([0.0]))

        assert out[0].nonzero().squeeze(1).tolist() == kept


@given(data=st.data(), rows=st.integers(1, 4))
def test_penalise_touches_only_the_tokens_named(data: st.DataObject, rows: int) -> None:
    """One request's past does not weigh on another's scores."""
    logits = _normal(rows, 13)
    pairs = data.draw(st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, 12)), unique=True))
    counts = torch.tensor([float(index % 3) for index in range(len(pairs))])
    penalties = {
        name: _normal(rows, seed=seed).exp() for seed, name in enumerate(("repetition", "presence", "frequency"))
    }
    expected = logits.clone()
    for (row, token), count in zip(pairs, counts.tolist(), strict=True):
        repetition, presence, frequency = (float(penalties[name][row]) for name in penalties)
        score = float(logits[row, token])
        score = score / repetition if score > 0 else score * repetition
        expected[row, token] = score - frequency * count - presence * (count > 0)
    where = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    penalise(logits, where[:, 0], where[:, 1], counts, **penalties)

    torch.testing.assert_close(logits, expected)
