"""Which CPUs each core computes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ConfigError
from engine.cpus import cpus_of_ranks


@pytest.mark.parametrize(
    ("bind", "allowed", "cpus"),
    [
        ("auto", {0, 1, 2, 5}, (0, 1, 2)),
        ("auto", {3}, (3,)),
        ("nobind", {0, 1}, None),
        ("0-2,5", {0, 1, 2, 3, 5}, (0, 1, 2, 5)),
        ("1", {0, 1}, (1,)),
    ],
)
def test_cpu_binding(bind: str, allowed: set[int], cpus: tuple[int, ...] | None) -> None:
    """`auto` leaves the last CPU to the frontend and the client, where there is more than one."""
    assert cpus_of_ranks(bind, allowed, quota=None) == (cpus,)


@pytest.mark.parametrize(
    ("quota", "cpus"), [(0.5, (2,)), (1.0, (2,)), (1.5, (2,)), (2.0, (2,)), (2.5, (2, 3)), (64.0, (2, 3, 5))]
)
def test_auto_keeps_within_the_quota(quota: float, cpus: tuple[int, ...]) -> None:
    """In a container of 2 CPUs on a host of 64, more threads would only wait for each other's time."""
    assert cpus_of_ranks("auto", {2, 3, 5, 8}, quota=quota) == (cpus,)


def test_a_count_takes_the_first_cpus_there_are() -> None:
    """An exported file does not name CPUs of the machine it was measured on."""
    assert cpus_of_ranks("count:2", {4, 5, 9}, quota=None) == ((4, 5),)
    assert cpus_of_ranks("count:3", {4, 5, 9}, quota=None) == ((4, 5, 9),)
    with pytest.raises(ConfigError, match=r"asks for 4 CPUs.* may use 3"):
        cpus_of_ranks("count:4", {4, 5, 9}, quota=None)


@pytest.mark.parametrize(
    "bind", ["", "a", "0-", "3-1", "0,3-1", "0,9", "0;1", "-1", "count:", "count:0", "count:-1", "count:a", "0|a"]
)
def test_a_binding_that_cannot_be_is_refused(bind: str) -> None:
    """It never falls back to some other CPUs in silence."""
    with pytest.raises(ConfigError, match="cpu_omp_threads_bind"):
        cpus_of_ranks(bind, {0, 1, 2, 3}, quota=None)


@given(
    allowed=st.sets(st.integers(0, 200), min_size=1, max_size=40),
    num_ranks=st.integers(1, 12),
    quota=st.none() | st.floats(0.1, 50),
)
def test_auto_gives_every_core_cpus_of_its_own_where_there_are_enough(
    allowed: set[int], num_ranks: int, quota: float | None
) -> None:
    """Two cores on one CPU while another idles would halve both; no core is left without any."""
    shares = cpus_of_ranks("auto", allowed, quota=quota, num_ranks=num_ranks)
    flat = [cpu for share in shares if share is not None for cpu in share]
    sizes = [len(share or ()) for share in shares]
    assert len(shares) == num_ranks
    assert set(flat) <= allowed
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if len(set(flat)) >= num_ranks:
        assert len(flat) == len(set(flat))


def test_each_core_may_have_a_list_of_its_own() -> None:
    """As `VLLM_CPU_OMP_THREADS_BIND` has it, so that a command line carries over."""
    assert cpus_of_ranks("0-1|3,5", {0, 1, 2, 3, 5}, quota=None, num_ranks=2) == ((0, 1), (3, 5))
    assert cpus_of_ranks("count:2", {4, 5, 9, 11}, quota=None, num_ranks=2) == ((4, 5), (9, 11))
    assert cpus_of_ranks("nobind", {0}, quota=None, num_ranks=2) == (None, None)


@pytest.mark.parametrize("bind", ["4", "2-4", "0-99999999999", "99999999999"])
def test_cpus_that_are_not_there_are_refused(bind: str) -> None:
    """At once, however many of them there are."""
    with pytest.raises(ConfigError, match="outside those this process may use"):
        cpus_of_ranks(bind, {0, 1, 2, 3}, quota=None, num_ranks=1)


@pytest.mark.parametrize(
    ("bind", "words"),
    [("0-1", "1 cores, data_parallel_size is 2"), ("0|1|2", "3 cores"), ("count:3", "3 CPUs for each of 2 cores")],
)
def test_lists_for_another_number_of_cores_are_refused(bind: str, words: str) -> None:
    """A core that shares another's CPUs by mistake would be slow, and nobody would know why."""
    with pytest.raises(ConfigError, match=words):
        cpus_of_ranks(bind, {0, 1, 2, 3}, quota=None, num_ranks=2)
