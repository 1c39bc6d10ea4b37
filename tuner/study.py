"""ask → trial → tell: the Optuna study. The only file that imports optuna.

A setting that failed, or that meets no limit, is told as violating constraints: told as failed, it would teach the
sampler nothing and be proposed again; told as a zero, it would pull the model of the objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from tuner.parameters import Parameter, SearchedValues
from tuner.space import SamplerName, SearchSpace, combinations

STUDY_NAME = "kneetune"
NUM_STARTUP_TRIALS = 5
"""Settings drawn at random before the sampler models anything."""

POPULATION = 8
"""Settings of one generation of NSGA-II: a study has tens of trials, not thousands."""

MAX_DRAWS = 3
"""Proposals of known or impossible settings before one of the others is drawn instead."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A setting to try: the study's own number for it, the values, and where they came from."""

    number: int
    values: SearchedValues
    origin: str


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a setting achieves at its operating point."""

    output_throughput: float
    ttft_p95_ms: float
    itl_p95_ms: float


class Study:
    """An Optuna study of a space and three objectives in a journal file, gone on with where there is one.

    A parameter of numbers is told to Optuna as the position among its choices: they rise, so that neighbours stay
    neighbours for the sampler, and a grid of powers of two is even. One of texts, true or false is categorical.
    """

    def __init__(
        self,
        space: SearchSpace,
        journal: Path,
        *,
        seed: int,
        sampler: SamplerName = "tpe",
        impossible: Callable[[SearchedValues], str | None] = lambda _: None,
    ) -> None:
        """Open the study.

        Args:
            impossible: why a combination can never work, None if it may: such a one is not proposed, and the sampler
                learns that it fails.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # The run's own lock lets one process at a time come here: a lock of Optuna's was left by one that was killed.
        Path(f"{journal}.lock").unlink(missing_ok=True)
        _drop_torn_line(journal)
        backend = JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal)))
        self._space = space
        self._seed = seed
        self._sampler = sampler
        self._impossible = impossible
        self._distributions = {name: _distribution(space.parameter(name)) for name in space.searched}
        self._known: set[SearchedValues] = set()
        self._queued: list[tuple[SearchedValues, str]] = []
        self._open: dict[int, optuna.Trial] = {}
        self._study = optuna.create_study(
            storage=JournalStorage(backend),
            study_name=STUDY_NAME,
            directions=["maximize", "minimize", "minimize"],
            load_if_exists=True,
        )
        self._reopened = self._take_up()

    def enqueue(self, values: SearchedValues, origin: str) -> None:
        """Try these values next, whatever the sampler thinks; they need not be among the choices."""
        self._queued.append((values, origin))

    @property
    def num_left_open(self) -> int:
        """Settings that a run cut off had asked for and not told; `ask` gives them first."""
        return len(self._reopened)

    def ask(self) -> Proposal | None:
        """The next setting that is not yet known; None when the space is exhausted.

        One that a run cut off had left open comes first.
        """
        if self._reopened:
            return self._reopened.pop(0)
        while self._queued:
            values, origin = self._queued.pop(0)
            if values not in self._known:
                return self._opened(self._ask_for(values), values, origin)
        if self._sampler == "grid":
            return self._any_unknown(None)
        # Seeded anew by what is known, so that a study cut off and gone on with proposes what it would have proposed.
        seeds = np.random.SeedSequence([self._seed, len(self._known)])
        self._study.sampler = _sampler(self._sampler, seed=self._seed, fresh_seed=int(seeds.generate_state(1)[0]))
        for _ in range(MAX_DRAWS):
            trial = self._study.ask(self._distributions)
            values = self._values(trial.params)
            if values in self._known:
                self._study.tell(trial, state=TrialState.FAIL)
                continue
            proposal, reason = self._opened(trial, values, "sampler"), self._impossible(values)
            if reason is None:
                return proposal
            self.tell_infeasible(proposal, {"works": 1.0}, reason)
        return self._any_unknown(np.random.default_rng(seeds))

    def tell_measured(self, proposal: Proposal, objectives: Objectives, constraints: Mapping[str, float]) -> None:
        """Report a measured setting; a constraint holds where its value is at most 0."""
        trial = self._open.pop(proposal.number)
        for name, value in constraints.items():
            trial.set_constraint(name, value)
        values = [objectives.output_throughput, objectives.ttft_p95_ms, objectives.itl_p95_ms]
        self._study.tell(trial, values=values)

    def tell_infeasible(self, proposal: Proposal, constraints: Mapping[str, float], reason: str) -> None:
        """Report a setting without an operating point: it failed, was refused, or breaks the limits everywhere."""
        trial = self._open.pop(proposal.number)
        for name, value in constraints.items():
            trial.set_constraint(name, value)
        trial.set_user_attr("reason", reason)
        self._study.tell(trial, state=TrialState.PRUNED)

    def tell_nothing(self, proposal: Proposal, reason: str) -> None:
        """Close a setting that was not measured for reasons outside it; a run that is gone on with may try it again."""
        trial = self._open.pop(proposal.number)
        trial.set_user_attr("reason", reason)
        self._study.tell(trial, state=TrialState.FAIL)

    def _take_up(self) -> list[Proposal]:
        """Know what the journal knows; returns the settings that were asked for and never told."""
        reopened = []
        for frozen in self._study.get_trials(deepcopy=False):
            is_open = frozen.state is TrialState.RUNNING
            if is_open and "values" not in frozen.user_attrs:
                self._study.tell(frozen.number, state=TrialState.FAIL)  # cut off before anybody knew of it
            elif is_open or frozen.state in (TrialState.COMPLETE, TrialState.PRUNED):
                values = SearchedValues.model_validate(frozen.user_attrs["values"])
                self._known.add(values)
                if is_open:
                    self._open[frozen.number] = optuna.Trial(self._study, frozen._trial_id)  # noqa: SLF001  (no other way)
                    reopened.append(Proposal(frozen.number, values, frozen.user_attrs["origin"]))
        return reopened

    def _any_unknown(self, rng: np.random.Generator | None) -> Proposal | None:
        """One of the settings nobody has tried: the first, or one drawn where the sampler keeps to known ones."""
        unknown = (values for values in combinations(self._space) if values not in self._known)
        possible = (values for values in unknown if self._impossible(values) is None)
        values = next(possible, None) if rng is None else _any_of(list(possible), rng)
        return None if values is None else self._opened(self._ask_for(values), values, "sampler")

    def _opened(self, trial: optuna.Trial, values: SearchedValues, origin: str) -> Proposal:
        self._known.add(values)
        self._open[trial.number] = trial
        trial.set_user_attr("origin", origin)
        trial.set_user_attr("values", values.model_dump())
        return Proposal(trial.number, values, origin)

    def _ask_for(self, values: SearchedValues) -> optuna.Trial:
        """Open a trial with these values; where they are not among the choices it has no parameters to learn from."""
        asked = {name: getattr(values, name) for name in self._space.searched}
        if any(value not in self._space.choices(name) for name, value in asked.items()):
            return self._study.ask()
        for name, value in asked.items():
            if self._space.parameter(name).is_number:
                asked[name] = self._space.choices(name).index(value)
        self._study.enqueue_trial(asked)
        return self._study.ask(self._distributions)

    def _values(self, told: Mapping[str, Any]) -> SearchedValues:
        chosen = dict(told)
        for name in self._space.searched:
            if self._space.parameter(name).is_number:
                chosen[name] = self._space.choices(name)[told[name]]
        return SearchedValues.model_validate(chosen)


def _distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.is_number:
        return IntDistribution(0, len(parameter.choices) - 1)
    return CategoricalDistribution(parameter.choices)


def _any_of(settings: Sequence[SearchedValues], rng: np.random.Generator) -> SearchedValues | None:
    return settings[int(rng.integers(len(settings)))] if settings else None


def _sampler(name: SamplerName, *, seed: int, fresh_seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's sampler of that name; one that draws a fixed sequence keeps the job's seed."""
    samplers = optuna.samplers
    match name:
        case "nsga2":
            return samplers.NSGAIISampler(population_size=POPULATION, seed=fresh_seed)
        case "gp":
            return samplers.GPSampler(seed=fresh_seed, n_startup_trials=NUM_STARTUP_TRIALS)
        case "qmc":
            return samplers.QMCSampler(
                scramble=True,
                seed=seed,
                independent_sampler=samplers.RandomSampler(seed=fresh_seed),  # of parameters without an order
                warn_asynchronous_seeding=False,
                warn_independent_sampling=False,
            )
        case "random":
            return samplers.RandomSampler(seed=fresh_seed)
        case _:
            return samplers.TPESampler(seed=fresh_seed, n_startup_trials=NUM_STARTUP_TRIALS)


def _drop_torn_line(journal: Path) -> None:
    """Cut off a last line that was not written to its end: what is appended after it could never be read."""
    if journal.is_file():
        written = journal.read_bytes()
        with journal.open("r+b") as file:
            file.truncate(written.rfind(b"\n") + 1)
