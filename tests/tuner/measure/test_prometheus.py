"""Reading /metrics: several engines, renamed metrics, resets, and what is not there."""

from __future__ import annotations

import pytest

from tests.fakes.server import Behaviour, running_stub
from tuner.measure.prometheus import MetricNames, Scraper, increase, parse_snapshot, read_infos, read_memory_bytes

TWO_ENGINES = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 10.0
vllm:num_preemptions_total{engine="1",model_name="m"} 9.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:prompt_tokens_total{engine="0"} 1.2e+06
vllm:generation_tokens_total{engine="0"} 5.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="4821",engine="0"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="4800",engine="1"} 1.0
engine:memory_bytes{engine="0",part="weights"} 1.048576e+06
engine:memory_bytes{engine="0",part="kv_cache"} 2048.0
engine:memory_bytes{engine="0",part="kv_block"} 16.0
engine:memory_bytes{engine="1",part="weights"} 1.048576e+06
engine:memory_bytes{engine="1",part="kv_cache"} 1024.0
engine:memory_bytes{engine="1",part="kv_block"} 16.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 2.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 5.0
vllm:iteration_tokens_total_sum{engine="0"} 900.0
vllm:iteration_tokens_total_sum{engine="1"} 300.0
vllm:iteration_tokens_total_count{engine="0"} 30.0
vllm:iteration_tokens_total_count{engine="1"} 10.0
vllm:iteration_tokens_total_created{engine="0"} 1.7e+09
engine:step_seconds_sum{engine="0",kind="decode"} 1.5
engine:step_seconds_sum{engine="0",kind="mixed"} 0.25
"""


def test_all_engines_are_read_together() -> None:
    """The first engine's series alone show half of the preemptions."""
    seen = parse_snapshot(TWO_ENGINES, at_s=1.5)
    assert (seen.at_s, seen.running, seen.waiting, seen.kv_cache_usage) == (1.5, 7, 0, 0.75)
    assert (seen.preemptions, seen.prompt_tokens, seen.generation_tokens) == (19, 1_200_000, 5)


def test_steps_are_read_from_the_histogram_of_all_cores() -> None:
    """How many tokens a step holds, and how many steps there are, tells budget, compute and server apart."""
    seen = parse_snapshot(TWO_ENGINES, at_s=0.0)
    assert (seen.num_cores, seen.steps, seen.step_tokens, seen.model_s) == (2, 40, 1200, 1.75)
    assert seen.waiting_deferred == 2
    unknown = parse_snapshot("", at_s=0.0)
    assert (unknown.num_cores, unknown.steps, unknown.step_tokens, unknown.model_s) == (None, None, None, None)
    assert unknown.waiting_deferred is None


def test_preemptions_of_two_engines_are_the_sum_of_their_increases() -> None:
    """3 and 5 before, 10 and 9 after are 11; the first engine alone would show 7."""

    def page(first: int, second: int) -> str:
        return f'vllm:num_preemptions_total{{engine="0"}} {first}\nvllm:num_preemptions_total{{engine="1"}} {second}\n'

    before, after = (parse_snapshot(page(*counts), at_s=0.0).preemptions for counts in ((3, 5), (10, 9)))
    assert increase(before, after) == 11


def test_what_is_not_there_is_unknown() -> None:
    """A constraint on preemptions must fail closed where the engine does not count them."""
    seen = parse_snapshot(TWO_ENGINES, at_s=0.0)
    assert (seen.prefix_queries, seen.prefix_hits) == (None, None)
    empty = parse_snapshot("", at_s=0.0)
    assert (empty.running, empty.waiting, empty.kv_cache_usage, empty.preemptions) == (None, None, None, None)


@pytest.mark.parametrize("name", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"])
def test_both_names_of_kv_usage_are_known(name: str) -> None:
    """The metric was renamed between releases; neither may read as an empty cache."""
    assert parse_snapshot(f'{name}{{engine="0"}} 0.5\n', at_s=0.0).kv_cache_usage == 0.5
    assert parse_snapshot(f"{name} 0.5\n", at_s=0.0).kv_cache_usage == 0.5


@pytest.mark.parametrize(
    ("before", "after", "grown"), [(8, 19, 11), (3, 3, 0), (19, 8, None), (None, 3, None), (3, None, None)]
)
def test_a_counter_that_fell_is_unknown(before: int | None, after: int | None, grown: int | None) -> None:
    """A restart between two scrapes must not show as no, or as negative, preemptions."""
    assert increase(before, after) == grown


def test_every_engines_labels_are_read() -> None:
    """What the engine says of itself is compared with what was asked."""
    assert read_infos(TWO_ENGINES, "vllm:cache_config_info") == [
        {"block_size": "16", "num_gpu_blocks": "4821", "engine": "0"},
        {"block_size": "16", "num_gpu_blocks": "4800", "engine": "1"},
    ]
    assert read_infos(TWO_ENGINES, "engine:config_info") == []


def test_memory_of_all_engines_is_added_up() -> None:
    """One engine's figures would show half of what a deployment takes; the size of a block is no amount."""
    assert read_memory_bytes(TWO_ENGINES) == {"weights": 2_097_152, "kv_cache": 3072, "kv_block": 16}
    assert read_memory_bytes("") == {}


async def test_the_scraper_survives_a_server_that_goes_away() -> None:
    """A lost scrape makes a figure unknown; it must not end the stage."""
    async with running_stub(Behaviour()) as stub:
        scraper = Scraper(stub.endpoint, origin_s=0.0)
        first = await scraper.scrape()
        assert first is not None
        assert (first.running, first.kv_cache_usage, first.preemptions) == (0, 0.25, 0)
    assert await scraper.scrape() is None
    assert await scraper.scrape() is None
    assert len(scraper.samples) == 1


class _Once(dict[str, tuple[int, str]]):
    """Pages that are served once."""

    def __getitem__(self, path: str) -> tuple[int, str]:
        return self.pop(path)


async def test_an_end_of_a_window_is_asked_for_twice() -> None:
    """One lost answer there would leave preemptions and cache hits of the whole stage unknown."""
    async with running_stub(Behaviour()) as stub:
        stub.pages = _Once({"/metrics": (503, "")})
        scraper = Scraper(stub.endpoint, origin_s=0.0)
        assert await scraper.scrape_end() is not None
        stub.pages = _Once({"/metrics": (503, "")})
        assert await scraper.scrape() is None


def test_an_engine_with_names_of_its_own_is_read_by_them() -> None:
    """Requests of an engine that is not vLLM are counted under its names; what has no name there is not told."""
    page = "llamacpp:requests_processing 3\nllamacpp:requests_deferred 5\nvllm:num_requests_running 9\n"
    names = MetricNames(running=("llamacpp:requests_processing",), waiting=("llamacpp:requests_deferred",))
    seen = parse_snapshot(page, names, at_s=0.0)
    assert (seen.running, seen.waiting, seen.preemptions, seen.kv_cache_usage) == (3, 5, None, None)
