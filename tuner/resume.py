"""Going on with a run that was cut off: only where it would measure the same thing as before."""

from __future__ import annotations

from tuner.answer import Provenance
from tuner.inputs import InputError, validated
from tuner.job import Budget, TuningJob
from tuner.provenance import provenance
from tuner.store import RunStore

_MAY_DIFFER = {"created", "simulated"}


def resumed_job(store: RunStore, *, budget: dict[str, object]) -> TuningJob:
    """The job of a run that is to go on, with more budget where some is given.

    Args:
        budget: keys of the job's `budget` and their new values.

    Raises:
        InputError: where engine, model, workload or machine are not what they were, naming each difference.
    """
    job = store.job()
    found = differences(store.provenance(), provenance(job))
    if found:
        raise InputError(
            f"{store.path} cannot go on, its figures would not be of one kind: {'; '.join(found)}. "
            "Start a new run, or go back to what it was"
        )
    return job.model_copy(update={"budget": validated(Budget, {**job.budget.model_dump(), **budget}, where="--resume")})


def differences(before: Provenance, now: Provenance) -> list[str]:
    """What can change a figure and is not as it was, each with both values."""
    then, today = (each.model_dump(exclude=_MAY_DIFFER) for each in (before, now))
    packages_then, packages_today = then.pop("packages"), today.pop("packages")
    both = [(name, value, today[name]) for name, value in then.items()]
    both += [(name, packages_then.get(name), packages_today.get(name)) for name in packages_then | packages_today]
    return [f"{name} was {old}, is {new}" for name, old, new in both if old != new]
