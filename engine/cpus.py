"""Which CPUs each core computes on."""

from __future__ import annotations

import math

from engine.config import ConfigError

RankCpus = tuple[tuple[int, ...] | None, ...]
"""For each core, in order of rank, the CPUs it may compute on; None leaves them alone."""


def cpus_of_ranks(bind: str, allowed: set[int], *, quota: float | None, num_ranks: int = 1) -> RankCpus:
    """Split the CPUs among the cores.

    Args:
        bind: `auto` (all allowed, and within the quota, but the last, which the parent needs, in equal shares; cores
            share CPUs where there are fewer of them), `nobind`, `count:4` (the next 4 allowed for each core), or a list
            for each core, such as `0-3,5` or `0-3|4-7` (vLLM's `VLLM_CPU_OMP_THREADS_BIND`).
        allowed: the CPUs this process may use.
        quota: CPU time this process may use; None is no limit. Unit: CPUs.
        num_ranks: how many cores there are.

    Raises:
        ConfigError: for a count or list that cannot be read, that asks for CPUs this process may not use, or lists for
            another number of cores.
    """
    ordered = sorted(allowed)
    if bind == "nobind":
        return (None,) * num_ranks
    if bind == "auto":
        return _shares(ordered if quota is None else ordered[: max(1, math.ceil(quota))], num_ranks)
    try:
        if bind.startswith("count:"):
            return _counts(bind, ordered, num_ranks)
        lists = [
            {cpu for part in text.split(",") for cpu in _cpu_range(part, max(allowed))} for text in bind.split("|")
        ]
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"cpu_omp_threads_bind={bind!r} is not auto, nobind, a count such as count:4 or a list such as 0-3,5"
        ) from error
    if len(lists) != num_ranks:
        raise ConfigError(
            f"cpu_omp_threads_bind={bind!r} has CPUs for {len(lists)} cores, data_parallel_size is {num_ranks}: "
            "write one list a core, with | between them"
        )
    if not set().union(*lists) <= allowed:
        raise ConfigError(f"cpu_omp_threads_bind={bind!r} names CPUs outside those this process may use: {ordered}")
    return tuple(tuple(sorted(chosen)) for chosen in lists)


def _shares(usable: list[int], num_ranks: int) -> RankCpus:
    """Equal shares of neighbours; the last CPU is left to the parent where every core has one without it."""
    if len(usable) > num_ranks:
        usable = usable[:-1]
    if len(usable) < num_ranks:
        return tuple((usable[rank % len(usable)],) for rank in range(num_ranks))
    bounds = [rank * len(usable) // num_ranks for rank in range(num_ranks + 1)]
    return tuple(tuple(usable[bounds[rank] : bounds[rank + 1]]) for rank in range(num_ranks))


def _counts(bind: str, ordered: list[int], num_ranks: int) -> RankCpus:
    count = int(bind.removeprefix("count:"))
    if count < 1:
        raise ValueError(f"{count} CPUs compute nothing")
    if count * num_ranks > len(ordered):
        cores = f" for each of {num_ranks} cores" if num_ranks > 1 else ""
        raise ConfigError(
            f"cpu_omp_threads_bind={bind!r} asks for {count} CPUs{cores}, but this process may use {len(ordered)}: "
            f"{ordered}"
        )
    return tuple(tuple(ordered[rank * count : (rank + 1) * count]) for rank in range(num_ranks))


def _cpu_range(text: str, last_allowed: int) -> range:
    """CPUs from the first to the last; of those that are not allowed, the first says enough."""
    first, dash, last = text.partition("-")
    cpus = range(int(first), int(last if dash else first) + 1)
    if not cpus:
        raise ValueError(f"{text} is an empty range")
    return cpus[: max(1, last_allowed + 2 - cpus.start)]
