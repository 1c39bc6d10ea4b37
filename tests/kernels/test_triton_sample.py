"""A token drawn on a GPU is the one that the reference draws, cut by cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels import sample as kernel
from tests.kernels.poison import padded, poisoned_outputs

ROWS = 6


def _logits(size: int, *, rows: int = ROWS, seed: int = 0) -> Tensor:
    return padded(3 * torch.randn((rows, size), generator=torch.Generator().manual_seed(seed)))


def _uniforms(rows: int = ROWS) -> Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def _cuts(
    top_k: int | Sequence[int] = 0, top_p: float = 1.0, min_p: float = 0.0, *, rows: int = ROWS
) -> dict[str, Tensor]:
    top_ks = torch.tensor([top_k] * rows if isinstance(top_k, int) else list(top_k))
    return {
        "top_ks": top_ks,
        "top_ps": torch.full((rows,), top_p, dtype=torch.float64),
        "min_ps": torch.full((rows,), min_p),
    }


@pytest.mark.parametrize("size", [1, 257, 4096, 9001])
def test_a_draw_inverts_the_distribution(size: int) -> None:
    """Vocabularies of less than a block, a whole one, and several with a rest."""
    logits, temperatures = _logits(size), torch.linspace(0.2, 2.0, ROWS)
    with poisoned_outputs():
        ours = kernel.sample(logits, temperatures, _uniforms())

    assert torch.equal(ours, reference.sample(logits, temperatures, _uniforms()))


@pytest.mark.parametrize(
    "cuts",
    [
        _cuts(top_k=1),
        _cuts(top_k=[1, 2, 7, 50, 4999, 0]),
        _cuts(top_p=0.3),
        _cuts(min_p=0.2),
        _cuts(top_k=40, top_p=0.8, min_p=0.01),
    ],
)
def test_cuts_keep_what_the_reference_keeps(cuts: dict[str, Tensor]) -> None:
    """Each cut on what the one before left; uniforms at both ends draw the first and the last token that is kept."""
    logits, temperatures = _logits(5000, seed=3), torch.linspace(0.3, 1.5, ROWS)
    for uniforms in (_uniforms(), torch.zeros(ROWS, dtype=torch.float64), torch.full((ROWS,), 1 - 2**-53).double()):
        with poisoned_outputs():
            ours = kernel.sample_likely(logits, temperatures, uniforms, **cuts)

        assert torch.equal(ours, reference.sample_likely(logits, temperatures, uniforms, **cuts))


def test_ties_with_the_last_one_kept_are_kept() -> None:
    """A cut is a property of the probabilities, not of the order of tokens: the third of three equals can be drawn."""
    logits = torch.full((1, 300), -5.0)
    logits[0, [20, 100, 299]] = 4.0
    cuts = _cuts(top_k=1, rows=1)
    drawn = {
        int(kernel.sample_likely(logits, torch.ones(1), torch.tensor([u], dtype=torch.float64), **cuts))
        for u in (0.1, 0.5, 0.9)
    }

    assert drawn == {20, 100, 299}


def test_a_row_draws_alone_what_it_draws_in_a_batch() -> None:
    """A seeded request gives the same tokens whoever else is served."""
    logits, temperatures, cuts = _logits(700, seed=5), torch.full((ROWS,), 0.8), _cuts(top_k=30, top_p=0.9)
    together = kernel.sample_likely(logits, temperatures, _uniforms(), **cuts)
    for row in range(ROWS):
        own = slice(row, row + 1)
        alone = kernel.sample_likely(
            logits[own], temperatures[own], _uniforms()[own], **{name: cut[own] for name, cut in cuts.items()}
        )
        assert int(alone) == int(together[row])


def test_a_row_that_overflowed_still_gives_a_token() -> None:
    """NaN must not become a token outside the vocabulary, which would end the engine."""
    logits = torch.full((1, 50), math.nan)
    with np.errstate(invalid="ignore"):  # numpy, which interprets the kernel, minds what the test is about
        drawn = kernel.sample(logits, torch.ones(1), torch.tensor([0.5], dtype=torch.float64))

    assert 0 <= int(drawn) < 50


def test_a_token_that_was_ruled_out_is_never_drawn() -> None:
    """Tokens of -inf have no weight, at either end of the uniform."""
    logits = torch.full((1, 64), -math.inf)
    logits[0, [5, 40]] = 1.0
    drawn = [
        int(kernel.sample(logits, torch.ones(1), torch.tensor([u], dtype=torch.float64))) for u in (0.0, 1 - 2**-53)
    ]

    assert drawn == [5, 40]
