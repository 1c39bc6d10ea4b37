"""What every test needs: no engine of a test shares a device with one outside it, and none is timed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

with pytest.MonkeyPatch.context() as patch:
    # Kernels run on a CPU here, interpreted. Triton asks as it is imported, which much that tests import does, and
    # again for each kernel's file. Processes that tests start are not told.
    patch.setenv("TRITON_INTERPRET", "1")
    import triton

triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = True

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
"""No property fails for the speed of the machine it is tried on."""


@pytest.fixture(scope="session", autouse=True)
def _own_ledgers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of wider fixtures share devices with nobody on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors that a test makes in this very process hold nothing in the next test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
