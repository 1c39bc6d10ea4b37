"""Three memory figures; one with an unknown part is unknown."""

from __future__ import annotations

import os

import psutil
import pytest

from tuner.measure.memory import EngineMemory, PssSampler, memory_figures, process_tree_pss_bytes

KNOWN = {"requested_bytes": 1000, "weights_bytes": 300, "activation_peak_bytes": 50, "kv_cache_bytes": 600}


def test_in_use_follows_the_load_and_reserved_does_not() -> None:
    """The share taken says nothing about the share needed: that is what the second figure is for."""
    low = memory_figures(EngineMemory(**KNOWN), kv_cache_usage_peak=0.1, device_peak_bytes=7)
    high = memory_figures(EngineMemory(**KNOWN), kv_cache_usage_peak=0.9, device_peak_bytes=None)
    assert (low.reserved_bytes, low.in_use_peak_bytes, low.device_peak_bytes) == (1000, 410, 7)
    assert (high.reserved_bytes, high.in_use_peak_bytes, high.device_peak_bytes) == (1000, 890, None)


def test_one_share_reserves_the_same_for_one_request_and_for_64() -> None:
    """At 0.90 of 24 GiB both reserve 21.6 GiB; only the peak in use tells that one of them needs no such share."""
    gib = 2**30
    engine = EngineMemory(
        requested_bytes=round(0.90 * 24 * gib),
        weights_bytes=5 * gib,
        activation_peak_bytes=gib,
        kv_cache_bytes=15 * gib,
    )
    one = memory_figures(engine, kv_cache_usage_peak=1 / 64, device_peak_bytes=None)
    many = memory_figures(engine, kv_cache_usage_peak=1.0, device_peak_bytes=None)
    assert one.reserved_bytes == many.reserved_bytes == round(21.6 * gib)
    assert (one.in_use_peak_bytes, many.in_use_peak_bytes) == (6 * gib + 15 * gib // 64, 21 * gib)


@pytest.mark.parametrize("missing", ["weights_bytes", "activation_peak_bytes", "kv_cache_bytes"])
def test_a_figure_with_an_unknown_part_is_unknown(missing: str) -> None:
    """Adding up what happens to be known would look like less memory."""
    engine = EngineMemory(**{key: value for key, value in KNOWN.items() if key != missing})
    assert memory_figures(engine, kv_cache_usage_peak=0.5, device_peak_bytes=None).in_use_peak_bytes is None
    assert (
        memory_figures(EngineMemory(**KNOWN), kv_cache_usage_peak=None, device_peak_bytes=None).in_use_peak_bytes
        is None
    )


def test_pss_of_this_process_is_plausible_and_of_none_is_unknown() -> None:
    """A process that cannot be read has no size; zero would win every comparison."""
    own = process_tree_pss_bytes(os.getpid())
    assert own is not None
    assert 5e6 < own <= psutil.virtual_memory().total
    gone = psutil.Popen(["/bin/true"])
    gone.wait()
    assert process_tree_pss_bytes(gone.pid) is None


async def test_the_sampler_without_a_process_stays_unknown() -> None:
    """A server that is not ours to look at has no device peak."""
    async with PssSampler(None) as sampler:
        pass
    assert sampler.peak_bytes is None
