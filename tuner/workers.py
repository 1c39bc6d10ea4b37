"""Ray: where trials run. The only file that imports ray.

A trial runs in an actor with a process of its own and reports as it goes, a value a stage; the driver, which owns the
study and the run directory, stays the only one that decides.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Iterator
from types import TracebackType
from typing import Self

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Whoever has the token can run code here. One of this process's own, read by Ray when it is imported, so that neither
# a setting of the environment turns it off nor a file in the home directory is read or written.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
# Ray makes its workers nice, and an engine launched by one with them: it would give way to whatever else runs here.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (Ray spells it so)
# Without it Ray warns about a default that changes; no trial here asks for a GPU of Ray yet.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray

from tuner.records import TrialRecord
from tuner.trial import TrialEvent, TrialSpec, WorkerLostError, run_trial

LIVENESS_S = 10.0
"""Between two looks whether Ray still lives, while a stage is measured. Unit: seconds."""


class Workers:
    """A Ray instance of our own on this machine, with one worker: one device takes one engine at a time."""

    def __init__(self) -> None:
        self._worker: ray.actor.ActorHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()
        ray.shutdown()

    def run(self, spec: TrialSpec) -> Iterator[TrialEvent]:
        """Run one trial: each stage's record as it ends, then the trial's.

        Raises:
            WorkerLostError: if the worker's process dies; the next trial gets a new one.
        """
        has_ended = False
        try:
            if self._worker is None:
                _start_ray()
                self._worker = ray.remote(num_cpus=1, max_restarts=0)(_Worker).remote()
            events = self._worker.run.remote(spec)
            while (reference := _next(events)) is not None:
                event = ray.get(reference)
                has_ended = isinstance(event, TrialRecord)
                yield event
        except (ray.exceptions.RayError, _NodeLostError, _RayStartError) as error:
            self._discard()
            ray.shutdown()  # whatever is left of the instance: the next trial gets a new one
            first_line = str(error).strip().partition("\n")[0]
            raise WorkerLostError(f"the worker of trial {spec.number} died: {first_line}") from error
        except BaseException:
            if not has_ended:  # given up half-way: its engine ends with its worker
                self._discard()
            raise

    def _discard(self) -> None:
        if self._worker is not None:
            ray.kill(self._worker)
            self._worker = None


class _NodeLostError(RuntimeError):
    """Ray's own processes are gone."""


class _RayStartError(RuntimeError):
    """Ray's own processes did not come up."""


def _next(events: ray.ObjectRefGenerator) -> ray.ObjectRef | None:
    """The next event's reference, None at the end. A wait that could last for ever is asked now and then what for."""
    while not ray.wait([events], timeout=LIVENESS_S)[0]:
        if not any(node["Alive"] for node in ray.nodes()):
            raise _NodeLostError("Ray's node is gone")
    return next(events, None)


def _start_ray() -> None:
    """Start an instance of our own, once. Its ports answer only to who has the token (docs/decisions/0007)."""
    if not ray.is_initialized():
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                num_cpus=1,
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:  # Ray raises nothing narrower when its node does not come up in time
            raise _RayStartError(f"Ray did not start: {error}") from error
        # Ray's own handler ends the process with a stack dump; a stop from outside is the same as Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


class _Worker:
    def run(self, spec: TrialSpec) -> Iterator[TrialEvent]:
        # Ray gives actors one OpenMP thread; the engine sets its own from the CPUs it may use.
        os.environ.pop("OMP_NUM_THREADS", None)
        yield from run_trial(spec)
