"""An engine launched for a config the way its adapter says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tuner.engine_config import EngineConfig
from tuner.engines.adapter import EngineAdapter, start_timeout_s
from tuner.engines.process import RunningEngine, free_port, launched, wait_until_ready
from tuner.job import EngineSpec


def starting(
    adapter: EngineAdapter,
    model: str,
    config: EngineConfig,
    spec: EngineSpec,
    *,
    served_model_name: str,
    directory: Path,
    environment: Mapping[str, str] = os.environ,
) -> AbstractContextManager[RunningEngine]:
    """Launch it on a free port; it is on its way up inside the block, and gone after it. As `process.launched`."""
    port = free_port()
    return launched(
        adapter.command(model, config, spec, port=port, served_model_name=served_model_name),
        port=port,
        environment=adapter.environment(environment, model, spec, num_devices=config.num_devices),
        directory=directory,
        exit_grace_s=adapter.exit_grace_s,
    )


@contextmanager
def serving(
    adapter: EngineAdapter,
    model: str,
    config: EngineConfig,
    spec: EngineSpec,
    *,
    served_model_name: str,
    directory: Path,
) -> Iterator[RunningEngine]:
    """As `starting`, and up.

    Raises:
        EngineStartError: where it does not come up.
    """
    with starting(adapter, model, config, spec, served_model_name=served_model_name, directory=directory) as engine:
        for _ in wait_until_ready(engine, adapter.health, timeout_s=start_timeout_s(adapter, spec)):
            pass
        yield engine
