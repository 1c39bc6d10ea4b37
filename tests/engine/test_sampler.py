"""Sampling: every parameter does what it says, and a seed repeats a draw, whatever else is in the batch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.request import SamplingParams
from engine.sampler import Sampler, seeded_uniform
from engine.step import ScheduledRequest

CPU = torch.device("cpu")
VOCABULARY = 257
LOGITS = torch.randn((1, VOCABULARY), generator=torch.Generator().manual_seed(0))
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def _logits(seed: int, *, rows: int = 1, vocabulary: int = VOCABULARY, spread: float = 2.0) -> Tensor:
    return spread * torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed))


def _request(
    *,
    output_index: int = 0,
    name: str = "r",
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    temperature: float = 1.0,
    seed: int | None = None,
) -> ScheduledRequest:
    params = sampling or SamplingParams(max_tokens=1, temperature=temperature, seed=seed)
    return ScheduledRequest(
        request_id=name,
        token_ids=(0,),
        start=0,
        block_ids=(0,),
        samples=True,
        output_index=output_index,
        sampling=params,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(outputs),
    )


def _draw(sampler: Sampler, *requests: ScheduledRequest, logits: Tensor = LOGITS) -> list[int]:
    """The tokens, in the requests' order. One row of logits serves all."""
    named = [dataclasses.replace(item, request_id=str(index)) for index, item in enumerate(requests)]
    return list(sampler.draw(logits.repeat(len(named), 1), named).sampled_token_ids.values())


def _draws(count: int, sampling: SamplingParams, logits: Tensor) -> Counter[int]:
    """How often each token comes, over seeds from 0."""
    sampler = _sampler(max_num_seqs=count)
    requests = [_request(sampling=dataclasses.replace(sampling, seed=seed)) for seed in range(count)]
    return Counter(_draw(sampler, *requests, logits=logits))


def _sampler(seed: int = 0, *, max_num_seqs: int = 64, eos_token_ids: tuple[int, ...] = ()) -> Sampler:
    return Sampler(seed=seed, max_num_seqs=max_num_seqs, eos_token_ids=eos_token_ids, device=CPU)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    min_tokens=st.sampled_from([0, 0, 3]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    top_k=st.sampled_from([0, 0, 1, 2, 20, VOCABULARY, 10**6]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    stop_token_ids=st.sampled_from([(), (7,)]),
    num_logprobs=st.sampled_from([None, 0, 5]),
    seed=st.sampled_from([None, 0, 7]),
)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)
REQUESTS = st.builds(
    lambda sampling, prompt, outputs: _request(
        sampling=sampling, prompt=prompt, outputs=outputs, output_index=len(outputs)
    ),
    PARAMS,
    TOKENS,
    TOKENS,
)


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


@given(
    request=REQUESTS,
    others=st.lists(REQUESTS | st.sampled_from([_request(), _request(sampling=GREEDY)]), max_size=6),
    place=st.integers(0, 6),
    logits_seed=st.integers(0, 99),
)
def test_no_neighbour_changes_an_answer(
    request: ScheduledRequest, others: list[ScheduledRequest], place: int, logits_seed: int
) -> None:
    """Whatever others in the batch ask for, a request gets the token and log-probabilities it would get alone."""
    request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=3), request_id="mine")
    batch = [dataclasses.replace(item, request_id=str(index)) for index, item in enumerate(others)]
    batch.insert(place, request)
    logits = _logits(logits_seed)
    alone = _sampler(eos_token_ids=(2,)).draw(logits.clone(), [request])
    among = _sampler(1, eos_token_ids=(2,)).draw(
        torch.stack([logits[0] if item is request else _logits(index)[0] for index, item in enumerate(batch)]), batch
    )

    assert among.sampled_token_ids["mine"] == alone.sampled_token_ids["mine"]
    assert among.logprobs.get("mine") == alone.logprobs.get("mine")
    asking = {item.request_id for item in batch if item.sampling.num_logprobs is not None}
    assert (set(among.sampled_token_ids), set(among.logprobs)) == ({item.request_id for item in batch}, asking)


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


@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    temperature=st.floats(0.01, 100),
    seed=st.integers(0, 10**6),
    top_p=st.floats(0.01, 1),
)
def test_a_top_k_of_one_is_greedy(scores: list[int], temperature: float, seed: int, top_p: float) -> None:
    """Two ways to ask for the most likely token agree, among equals too."""
    logits = torch.tensor([scores], dtype=torch.float32)
    one = SamplingParams(max_tokens=1, temperature=temperature, top_k=1, seed=seed, top_p=top_p)

    assert _draw(_sampler(), _request(sampling=one), logits=logits) == [int(logits.argmax())]


def _kept(logits: Tensor, params: SamplingParams) -> dict[int, float]:
    """The tokens that a slow reading of the three cuts leaves, with their probabilities."""
    weights = [math.exp(value / params.temperature) for value in logits[0].double().tolist()]
    kept = {token: weight / sum(weights) for token, weight in enumerate(weights)}
    kept = {token: prob for token, prob in kept.items() if prob >= params.min_p * max(kept.values())}
    ordered = sorted(kept, key=lambda token: -kept[token])[: params.top_k or len(kept)]
    mass, nucleus = 0.0, []
    for token in ordered:
        if mass < params.top_p * sum(kept[other] for other in ordered):
            nucleus.append(token)
            mass += kept[token]
    return {token: kept[token] / mass for token in nucleus}


CUTS = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    top_k=st.sampled_from([0, 1, 3, 50, 10**9]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
)


@given(cuts=CUTS, logits_seed=st.integers(0, 1000))
def test_only_tokens_that_a_cut_keeps_are_drawn(cuts: SamplingParams, logits_seed: int) -> None:
    """top_p, top_k and min_p, together as well: nothing outside is drawn, and what is inside can be."""
    logits = _logits(logits_seed, vocabulary=31)
    kept = _kept(logits, cuts)
    drawn = _draws(64, cuts, logits)

    assert drawn.keys() <= kept.keys()
    likely = {token for token, prob in kept.items() if prob > 0.3}
    assert likely <= drawn.keys()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=1, temperature=0.7),
        SamplingParams(max_tokens=1, top_p=0.8),
        SamplingParams(max_tokens=1, top_k=4, temperature=2.0),
        SamplingParams(max_tokens=1, min_p=0.1),
        SamplingParams(max_tokens=1, top_k=6, top_p=0.9, min_p=0.05, temperature=1.5),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Over 10,000 seeds each token comes as often as its share of what was kept says (chi-square, fixed seeds)."""
    logits = _logits(4, vocabulary=11, spread=1.0)
    kept = _kept(logits, params)
    count = 10_000
    drawn = _draws(count, params, logits)
    statistic = sum((drawn[token] - count * prob) ** 2 / (count * prob) for token, prob in kept.items())

    assert drawn.keys() == kept.keys()
    # Wilson and Hilferty's bound: mean k, 4 standard deviations; a true fit passes it once in 30,000 times.
    freedom = len(kept) - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


@given(request=REQUESTS, logits_seed=st.integers(0, 99))
def test_penalties_are_those_of_a_slow_reading(request: ScheduledRequest, logits_seed: int) -> None:
    """Repetition over prompt and outputs, presence and frequency over outputs, each token once, in vLLM's order."""
    params = dataclasses.replace(request.sampling, temperature=0.0, min_tokens=0)
    scores = _logits(logits_seed)[0]
    for token in {*request.prompt_token_ids, *request.output_token_ids}:
        if scores[token] > 0:
            scores[token] /= params.repetition_penalty
        else:
            scores[token] *= params.repetition_penalty
        count = request.output_token_ids.count(token)
        scores[token] -= params.frequency_penalty * count
        scores[token] -= params.presence_penalty if count else 0.0
    logits = _logits(logits_seed)
    _sampler().draw(logits, [dataclasses.replace(request, sampling=params)])

    torch.testing.assert_close(logits[0], scores, rtol=1e-6, atol=1e-6)


def test_penalties_lead_a_greedy_answer_elsewhere() -> None:
    """A greedy request that repeats itself is talked out of it, and its neighbour is not."""
    best, second = LOGITS[0].topk(2).indices.tolist()
    strict = dataclasses.replace(GREEDY, presence_penalty=2.0)
    requests = [_request(sampling=strict, outputs=[best]), _request(sampling=GREEDY, outputs=[best])]

    assert _draw(_sampler(), *requests) == [second, best]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=9, temperature=5.0, top_k=3)])
def test_no_end_before_min_tokens(params: SamplingParams) -> None:
    """Ends and stop tokens become impossible for as long as was asked, and possible again after."""
    best, second, third, *_ = LOGITS[0].topk(4).indices.tolist()
    params = dataclasses.replace(params, min_tokens=2, stop_token_ids=(second, 10**6), seed=0)
    sampler = _sampler(eos_token_ids=(best, 10**6))
    early = {
        token
        for seed in range(50)
        for token in _draw(
            sampler,
            *(_request(sampling=dataclasses.replace(params, seed=seed), output_index=index) for index in (0, 1)),
        )
    }
    late = {
        _draw(sampler, _request(sampling=dataclasses.replace(params, seed=seed), output_index=2))[0]
        for seed in range(50)
    }

    assert third in early
    assert not early & {best, second}
    assert best in late


@given(logits_seed=st.integers(0, 99), count=st.integers(0, 20), temperature=st.sampled_from([0.0, 3.0]))
def test_logprobs_are_the_models_own(logits_seed: int, count: int, temperature: float) -> None:
    """What a client reads is what the model thought, before temperature, penalties and cuts (vLLM: `raw_logprobs`)."""
    params = SamplingParams(
        max_tokens=9,
        temperature=temperature,
        top_k=5,
        seed=1,
        num_logprobs=count,
        repetition_penalty=1.5,
        min_tokens=5,
    )
    result = _sampler(eos_token_ids=(3,)).draw(_logits(logits_seed), [_request(sampling=params, outputs=[4, 4, 5])])
    expected = _logits(logits_seed)[0].double().log_softmax(0)
    told = result.logprobs["r"]

    assert told.logprob == pytest.approx(expected[result.sampled_token_ids["r"]].item(), abs=1e-5)
    assert [token for token, _ in told.top] == expected.topk(count).indices.tolist()
    assert [value for _, value in told.top] == pytest.approx(expected.topk(count).values.tolist(), abs=1e-5)
