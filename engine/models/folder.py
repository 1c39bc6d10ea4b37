"""Where a model's files are: the embedded model, a local folder, or the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from engine.config import ConfigError

EMBEDDED = "embedded"
"""The name of the model that ships with this package."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja"]


def model_folder(model: str) -> Path:
    """Find the folder that holds `model`'s `config.json`; a hub id is downloaded first. Code is never downloaded.

    Raises:
        ConfigError: where there is none, naming what was tried.
    """
    if model == EMBEDDED:
        return Path(__file__).parent / "embedded"
    try:
        folder = Path(model).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long; ~ and no such user
        raise ConfigError(f"model={model!r} cannot be looked for: {error}") from error
    if is_folder:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model={model!r} is a folder without a config.json: point it at a Hugging Face folder")
        return folder
    if _HUB_ID.fullmatch(model) is None:
        raise ConfigError(
            f"model={model!r} is neither {EMBEDDED!r}, nor a folder here, nor a hub id (owner/name): "
            f"tried {folder.absolute()}"
        )
    return _download(model)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_FILES))
    except (OSError, HFValidationError) as error:  # the hub's own errors are OSErrors
        raise ConfigError(
            f"model={hub_id!r} is no folder here (tried {Path(hub_id).absolute()}), and the Hugging Face hub "
            f"did not give it: {error}"
        ) from error
