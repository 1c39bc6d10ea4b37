"""Sampling: repeatable where a seed is given, whatever else is in the batch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampler import Sampler, seeded_uniform
from engine.step import ScheduledRequest

CPU = torch.device("cpu")
LOGITS = torch.randn((1, 257), generator=torch.Generator().manual_seed(0))


def _request(*, temperature: float = 1.0, seed: int | None = None, output_index: int = 0) -> ScheduledRequest:
    return ScheduledRequest(
        request_id="r",
        token_ids=(0,),
        start=0,
        block_ids=(0,),
        samples=True,
        output_index=output_index,
        sampling=SamplingParams(max_tokens=1, temperature=temperature, seed=seed),
    )


def _draw(sampler: Sampler, *requests: ScheduledRequest) -> list[int]:
    return sampler.draw(LOGITS.expand(len(requests), -1), requests)


def _sampler(seed: int = 0) -> Sampler:
    return Sampler(seed=seed, max_num_seqs=64, device=CPU)


@given(
    seed=st.integers(-(2**63), 2**64),
    output_index=st.integers(0, 10**6),
    before=st.lists(st.sampled_from([None, 0, 7]), max_size=5),
    engine_seed=st.integers(0, 3),
)
def test_a_seeded_draw_depends_on_seed_and_index_only(
    seed: int, output_index: int, before: list[int | None], engine_seed: int
) -> None:
    """A user's seed gives the same text alone and in a full batch, on an engine of any seed."""
    request = _request(seed=seed, output_index=output_index)
    others = [_request(seed=other) for other in before]
    alone = _draw(_sampler(), request)

    sampler = _sampler(engine_seed)
    _draw(sampler, *others, request)

    assert _draw(sampler, *others, request)[-1] == alone[0]


def test_a_seeds_outputs_are_not_one_draw_repeated() -> None:
    """Each output has a draw of its own, spread over [0, 1), and another seed has others: 0 is a seed like any."""
    draws = [[seeded_uniform(seed, index) for index in range(1000)] for seed in (0, 1, -1)]

    assert len({value for drawn in draws for value in drawn}) == 3000
    for drawn in draws:
        assert abs(sum(drawn) / 1000 - 0.5) < 0.05
        assert 0 <= min(drawn) < 0.01
        assert 0.99 < max(drawn) < 1


def test_without_a_seed_the_engines_generator_goes_on() -> None:
    """Equal requests get different answers, and the same engine seed replays them."""
    first, second, other = _sampler(5), _sampler(5), _sampler(6)
    requests = [_request()] * 32
    replayed = [_draw(sampler, *requests) + _draw(sampler, *requests) for sampler in (first, second, other)]

    assert replayed[0] == replayed[1] != replayed[2]
    assert replayed[0][:32] != replayed[0][32:]


def test_a_low_temperature_is_greedy() -> None:
    """Temperatures from 0 to the smallest positive float give the most likely token, never a NaN."""
    best = int(LOGITS.argmax())
    requests = [_request(temperature=t, seed=1) for t in (0.0, 5e-324, 1e-6, 1e-4)]

    assert _draw(_sampler(), *requests, _request(seed=1))[:4] == [best] * 4
