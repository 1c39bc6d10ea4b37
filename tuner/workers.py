"""Ray: where trials run. The only file that imports ray.

A trial runs in an actor with a process of its own and reports as it goes, a value a stage; the driver, which owns the
study and the run directory, stays the only one that decides. Ray says which GPUs an actor has.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Whoever has the token can run code here. One of this process's own, read by Ray when it is imported, so that neither
# a setting of the environment turns it off nor a file in the home directory is read or written.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
# Ray makes its workers nice, and an engine launched by one with them: it would give way to whatever else runs here.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (Ray spells it so)
# Without it Ray warns about a default that changes; a trial on the CPU keeps the variable as it is.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray

from tuner.engines.device_return import DeviceFull
from tuner.inputs import InputError
from tuner.placement import Placement
from tuner.records import TrialRecord
from tuner.trial import TrialEvent, TrialSpec, WorkerLost, run_trial

LIVENESS_S = 10.0
"""Between two looks whether Ray still lives, while a stage is measured. Unit: seconds."""


@dataclass(frozen=True, slots=True)
class _Worker:
    """An actor, and the GPUs it holds as long as it lives."""

    actor: ray.actor.ActorHandle
    num_gpus: int


@dataclass(frozen=True, slots=True)
class _Run:
    """A trial that runs."""

    worker: _Worker
    events: ray.ObjectRefGenerator


class Workers:
    """A Ray instance of our own on this machine, with a worker for each trial that runs at once."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._idle: list[_Worker] = []
        self._running: dict[int, _Run] = {}
        self._set_aside: list[_Worker] = []
        """Each holds on to devices that a trial left full, so that Ray gives them to nobody."""

        self._reports: deque[tuple[int, TrialEvent | WorkerLost]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in list(self._running):
            self.give_up(number)
        self._discard_idle()
        while self._set_aside:
            ray.kill(self._set_aside.pop().actor)
        ray.shutdown()

    @property
    def parallel_trials(self) -> int:
        """How many trials run at once: a device that was left full is no place any more."""
        return self._placement.parallel_trials - len(self._set_aside)

    def start(self, spec: TrialSpec) -> None:
        """Begin a trial. Where Ray does not come up for it, it is lost.

        Raises:
            InputError: if it takes more GPUs than Ray has: it would wait for ever.
        """
        num_gpus = spec.config.num_devices if self._placement.num_gpus else 0
        try:
            _start_ray(self._placement)
            present = ray.cluster_resources().get("GPU", 0)
            if num_gpus > present:
                raise InputError(f"{spec.config.parallel_sizes} takes {num_gpus} GPUs, and Ray has {present:g}")
            worker = self._take_worker(num_gpus)
            self._running[spec.number] = _Run(worker, worker.actor.run.remote(spec))
        except (ray.exceptions.RayError, _RayStartError) as error:
            self._lose(spec.number, str(error))

    def next_event(self) -> tuple[int, TrialEvent | WorkerLost]:
        """Wait for any trial that runs: its number and what it reports; a worker that dies is a report too."""
        while not self._reports:
            self._look()
        return self._reports.popleft()

    def give_up(self, number: int) -> None:
        """End a trial half-way: its engine ends with its worker."""
        self._reports = deque(report for report in self._reports if report[0] != number)
        if (run := self._running.pop(number, None)) is not None:
            ray.kill(run.worker.actor)

    def _take_worker(self, num_gpus: int) -> _Worker:
        """The worker with so many GPUs that was idle last, so that launches one by one meet one device; or a new one.

        Idle ones with other numbers of GPUs give theirs back for it.
        """
        for worker in reversed(self._idle):
            if worker.num_gpus == num_gpus:
                self._idle.remove(worker)
                return worker
        self._discard_idle()
        actor = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=0)(_TrialActor).remote()
        return _Worker(actor, num_gpus)

    def _look(self) -> None:
        """Take in what comes next. A wait that could last for ever is asked now and then what for."""
        ready, _ = ray.wait([run.events for run in self._running.values()], timeout=LIVENESS_S)
        is_lost = not ready and not any(node["Alive"] for node in ray.nodes())
        for number, run in list(self._running.items()):
            if is_lost:
                self._lose(number, "Ray's node is gone")
            elif run.events in ready:
                self._take_report(number, run)

    def _take_report(self, number: int, run: _Run) -> None:
        try:
            reference = next(run.events, None)
            event = None if reference is None else ray.get(reference)
        except ray.exceptions.RayError as error:
            self._lose(number, str(error))
            return
        if event is None:
            self._lose(number, "it ended without a result")
            return
        if isinstance(event, DeviceFull):
            self._set_aside.append(run.worker)
        if isinstance(event, TrialRecord):
            del self._running[number]
            if run.worker not in self._set_aside:
                self._idle.append(run.worker)
        self._reports.append((number, event))

    def _lose(self, number: int, reason: str) -> None:
        """Report a trial as lost. Its worker is not used again, nor is the instance where nobody needs it."""
        self.give_up(number)
        if not self._running and not self._set_aside:
            self._discard_idle()
            ray.shutdown()
        first_line = reason.strip().partition("\n")[0]
        self._reports.append((number, WorkerLost(detail=f"the worker of trial {number} died: {first_line}")))

    def _discard_idle(self) -> None:
        while self._idle:
            ray.kill(self._idle.pop().actor)


class _RayStartError(RuntimeError):
    """Ray's own processes did not come up."""


def _start_ray(placement: Placement) -> None:
    """Start an instance of our own, once. Its ports answer only to who has the token (docs/decisions/0007)."""
    if not ray.is_initialized():
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                num_cpus=placement.parallel_trials,
                num_gpus=placement.num_gpus,
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:  # Ray raises nothing narrower when its node does not come up in time
            raise _RayStartError(f"Ray did not start: {error}") from error
        # Ray's own handler ends the process with a stack dump; a stop from outside is the same as Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


class _TrialActor:
    def run(self, spec: TrialSpec) -> Iterator[TrialEvent]:
        # Ray gives actors one OpenMP thread; the engine sets its own from the CPUs it may use.
        os.environ.pop("OMP_NUM_THREADS", None)
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        yield from run_trial(spec, gpus=tuple(gpus))
