"""Weights: from safetensors as they are, or made up the same for the same seed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config import ConfigError, EngineConfig
from engine.executor.torch import TorchExecutor
from engine.models.config import read_model_config
from engine.models.families import FAMILIES
from engine.models.folder import model_folder
from engine.models.weights import Checkpoint, Dummy, ModelWeights, load_weights
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig

CPU = torch.device("cpu")
EMBEDDED = read_model_config(model_folder("embedded"))
CONFIG = dataclasses.replace(EMBEDDED, num_layers=1)


def _made_up(seed: int) -> ModelWeights:
    return load_weights(Dummy(seed, CONFIG), CONFIG, dtype=torch.float32, device=CPU)


def test_a_seed_makes_the_same_weights() -> None:
    """Two engines of one seed serve the same model; another seed, 0 included, another model."""
    first, again, other = _made_up(0), _made_up(0), _made_up(1)

    torch.testing.assert_close(first.layers[-1].down.weight, again.layers[-1].down.weight, atol=0, rtol=0)
    assert not torch.equal(first.layers[-1].down.weight, other.layers[-1].down.weight)


@pytest.mark.parametrize("is_packed", [True, False])
def test_every_weight_is_counted_once(*, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory budget charges a tied output layer where it is packed, being a copy then, and only there."""
    monkeypatch.setattr("kernels.linear.has_packed_product", lambda: is_packed)
    weights = load_weights(Dummy(0, EMBEDDED), EMBEDDED, dtype=torch.float32, device=CPU)

    assert weights.lm_head.holds(weights.embedding) == (not is_packed)
    assert weights.num_bytes() == 4 * (5_313_920 + is_packed * 512 * 384)


def test_a_tensor_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A checkpoint that does not belong to its config.json does not load halfway."""
    save_file({"model.norm.weight": torch.ones(3), "packed": torch.ones(3).int()}, tmp_path / "model.safetensors")
    source = Checkpoint(tmp_path)

    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \(3,\).*\(4,\)"):
        source.read("model.norm.weight", (4,))
    with pytest.raises(ConfigError, match=r"no tensor lm_head\.weight"):
        source.read("lm_head.weight", (4, 4))
    with pytest.raises(ConfigError, match=r"packed is int32.*float32, bfloat16, float16"):
        source.read("packed", (3,))
    torch.testing.assert_close(source.read("model.norm.weight", (3,)), torch.ones(3))


def _sharded(folder: Path) -> None:
    save_file({"a": torch.ones(64)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(64)}, folder / "model-2.safetensors")
    _write_index(folder, {"a": "model-1.safetensors", "b": "model-2.safetensors"})


def _write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_missing_shard_is_named_before_anything_loads(tmp_path: Path) -> None:
    """A download that was cut off is said to be, with what to fetch again."""
    _sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()

    with pytest.raises(ConfigError, match=r"lacks model-2\.safetensors: 1 of the 2 shards"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 100, 300])
def test_a_shard_that_was_cut_off_is_named(tmp_path: Path, size: int) -> None:
    """No engine starts on half a file."""
    _sharded(tmp_path)
    shard = tmp_path / "model-2.safetensors"
    assert shard.stat().st_size > size
    shard.write_bytes(shard.read_bytes()[:size])

    with pytest.raises(ConfigError, match=r"model-2\.safetensors cannot be read.*is it whole"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "x.bin", ""])
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """A checkpoint reads no files but its own."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    _sharded(folder)
    save_file({"b": torch.ones(64)}, tmp_path / "x.safetensors")
    _write_index(folder, {"a": "model-1.safetensors", "b": name})

    with pytest.raises(ConfigError, match=r"not a \.safetensors file of its folder") as error:
        Checkpoint(folder)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, "model-1.safetensors"])
def test_a_damaged_index_is_refused(tmp_path: Path, weight_map: object) -> None:
    """One readable line, not a traceback."""
    _sharded(tmp_path)
    _write_index(tmp_path, weight_map)

    with pytest.raises(ConfigError, match=r"index\.json is not an index"):
        Checkpoint(tmp_path)


def test_links_are_followed(tmp_path: Path) -> None:
    """The hub's cache keeps shards as links to files elsewhere."""
    store, folder = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    folder.mkdir()
    _sharded(store)
    for path in store.iterdir():
        (folder / path.name).symlink_to(path)

    torch.testing.assert_close(Checkpoint(folder).read("b", (64,)), torch.ones(64))


class _Tied:
    """Made-up weights with an output layer in the checkpoint beside the tied embedding."""

    def __init__(self, lm_head: torch.Tensor | None) -> None:
        self._lm_head = lm_head
        self._others = Dummy(0, CONFIG)

    def __contains__(self, name: object) -> bool:
        return name == "lm_head.weight" and self._lm_head is not None

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name == "lm_head.weight" and self._lm_head is not None:
            return self._lm_head
        return self._others.read(name, shape)


def test_a_tied_output_layer_is_the_embedding_unless_the_checkpoint_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A saved copy costs no memory; a layer of its own is used, as in transformers, whatever config.json says."""
    monkeypatch.setattr("kernels.linear.has_packed_product", lambda: False)
    copy = _made_up(0).embedding.clone()
    for lm_head, shared in ((None, True), (copy, True), (copy + 1, False)):
        weights = load_weights(_Tied(lm_head), CONFIG, dtype=torch.float32, device=CPU)

        assert weights.lm_head.holds(weights.embedding) == shared
        assert lm_head is None or torch.equal(weights.lm_head.weight, lm_head)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype_loads_as_any_other(tmp_path: Path, saved: torch.dtype, dtype: torch.dtype) -> None:
    """A checkpoint is served in the dtype asked for, whatever it was saved in, and holds no file open."""
    expected = {}

    class Recorder(Dummy):
        def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            expected[name] = super().read(name, shape).to(saved)
            return expected[name]

    load_weights(Recorder(0, CONFIG), CONFIG, dtype=dtype, device=CPU)
    save_file(expected, tmp_path / "model.safetensors")
    weights = load_weights(Checkpoint(tmp_path), CONFIG, dtype=dtype, device=CPU)
    (tmp_path / "model.safetensors").write_bytes(b"")

    down = expected["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(weights.layers[0].down.weight, down.to(dtype))
    assert weights.layers[0].qkv.weight.dtype == weights.final_norm.dtype == dtype


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name != "Gemma3ForConditionalGeneration"])
def test_made_up_weights_serve_every_family(tmp_path: Path, architecture: str) -> None:
    """A rehearsal without a download generates text that varies, whatever the architecture."""
    said = json.loads((model_folder("embedded") / "config.json").read_text())
    said |= {"architectures": [architecture], "hidden_size": 96, "num_hidden_layers": 3, "head_dim": 32}
    said |= {"rope_parameters": None, "sliding_window": 8, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        device="cpu",
        max_num_seqs=1,
        max_model_len=64,
        num_gpu_blocks_override=4,
        device_memory_bytes=2**28,
    )
    executor = TorchExecutor(config)
    scheduler = Scheduler(SchedulerConfig.from_resolved(executor.resolved))
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    scheduler.add(Request(request_id="a", prompt_token_ids=(5, 6, 7), sampling=sampling))
    outputs = set()
    while scheduler.num_running + scheduler.num_waiting:
        outputs |= {token.token_id for token in scheduler.commit(executor.execute(scheduler.schedule()))}

    assert len(outputs) > 10


def test_a_folder_without_safetensors_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Pickled weights are never opened; made-up ones are offered."""
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(ConfigError, match="load_format=dummy"):
        Checkpoint(tmp_path)
