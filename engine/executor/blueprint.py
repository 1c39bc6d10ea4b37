"""What is decided before anything is loaded: device, model, length and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import (
    ConfigError,
    EngineConfig,
    check_against_model,
    check_one_device,
    check_tensor_parallel,
    split_device,
)
from engine.executor.least import least_memory
from engine.memory import LeastMemory
from engine.models.config import ModelConfig, read_model_config
from engine.models.folder import model_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What is decided before anything is loaded."""

    config: EngineConfig
    device: torch.device
    folder: Path
    model: ModelConfig
    max_model_len: int
    dtype: str
    least: LeastMemory
    warnings: tuple[str, ...]


def blueprint(config: EngineConfig) -> Blueprint:
    """Decide device, model, length and dtype.

    Raises:
        ConfigError: for a model that is not there or not supported, a length beyond the model's, a device that is
            missing, or more than one.
    """
    device = _device(config)
    folder = model_folder(config.model)
    model = read_model_config(folder)
    check_tensor_parallel(config.tensor_parallel_size, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads)
    check_one_device(config.tensor_parallel_size)
    max_model_len, dtype = _max_model_len(config, model), _checked_dtype(config, model, device)
    return Blueprint(
        config=config,
        device=device,
        folder=folder,
        model=model,
        max_model_len=max_model_len,
        dtype=dtype,
        least=least_memory(config, model, max_model_len=max_model_len, dtype=DTYPES[dtype], device=device),
        warnings=tuple(check_against_model(config, max_model_len=max_model_len)),
    )


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    own = model.max_position_embeddings
    if config.max_model_len is None:
        return own
    if config.max_model_len > own:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the {own} positions of model {config.model!r}: "
            f"ask for at most {own}"
        )
    return config.max_model_len


def _device(config: EngineConfig) -> torch.device:
    kind, number = split_device(config.device)
    if kind == "auto" and config.device_memory_bytes is not None:
        kind = "cpu"
    num_gpus = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cuda" and not num_gpus:
        raise ConfigError(f"device={config.device!r}, but torch finds no CUDA device: use device='cpu'")
    if not num_gpus:
        return torch.device("cpu")
    if number >= num_gpus:
        raise ConfigError(f"device={config.device!r}, but torch finds {num_gpus} CUDA devices: 0 to {num_gpus - 1}")
    if config.device_memory_bytes is not None:
        raise ConfigError(
            f"device_memory_bytes={config.device_memory_bytes} is the size of a device on a CPU, and a GPU has its "
            f"own: leave it out, or set device='cpu' in place of {config.device!r}"
        )
    return torch.device("cuda", number)


def _checked_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> str:
    dtype = _dtype(config, model, device)
    if dtype == "float16" and not model.fits_float16:
        raise ConfigError(
            f"dtype={config.dtype!r} is float16 here, which overflows in model {config.model!r}: "
            "ask for bfloat16 or float32"
        )
    return dtype


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> str:
    """`auto` is float32 on a CPU, where the others are slower, and the checkpoint's own on a GPU."""
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu":
        return "float32"
    if model.checkpoint_dtype not in DTYPES:
        raise ConfigError(
            f"dtype='auto' takes the checkpoint's own, {model.checkpoint_dtype}, which is not supported: "
            f"ask for one of {', '.join(DTYPES)}"
        )
    return model.checkpoint_dtype
