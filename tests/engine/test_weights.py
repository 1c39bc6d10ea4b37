"""Weights: from safetensors as they are, or made up the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config import ConfigError
from engine.models.config import read_model_config
from engine.models.folder import model_folder
from engine.models.weights import ModelWeights, checkpoint, dummy, load_weights

CPU = torch.device("cpu")
CONFIG = read_model_config(model_folder("embedded"))


def _made_up(seed: int) -> ModelWeights:
    return load_weights(dummy(seed), CONFIG, dtype=torch.float32, device=CPU)


def test_a_seed_makes_the_same_weights() -> None:
    """Two engines of one seed serve the same model; another seed, 0 included, another model."""
    first, again, other = _made_up(0), _made_up(0), _made_up(1)

    torch.testing.assert_close(first.layers[-1].down, again.layers[-1].down, atol=0, rtol=0)
    assert not torch.equal(first.layers[-1].down, other.layers[-1].down)


def test_tied_weights_are_counted_once() -> None:
    """The memory budget does not charge the output layer of a model that shares it with its embedding."""
    weights = _made_up(0)

    assert weights.lm_head is weights.embedding
    assert weights.num_bytes() == 4 * 5_313_920


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    """A checkpoint that does not belong to its config.json does not load halfway."""
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    source = checkpoint(tmp_path)

    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \(3,\).*\(4,\)"):
        source("model.norm.weight", (4,))
    with pytest.raises(ConfigError, match=r"no tensor lm_head\.weight"):
        source("lm_head.weight", (4, 4))
    torch.testing.assert_close(source("model.norm.weight", (3,)), torch.ones(3))


def test_a_folder_without_safetensors_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Pickled weights are never opened; made-up ones are offered."""
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(ConfigError, match="load_format=dummy"):
        checkpoint(tmp_path)
