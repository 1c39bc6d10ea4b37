"""Where a model is looked for, and what its `config.json` may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError
from engine.models.config import read_model_config
from engine.models.embedded.make import files
from engine.models.folder import model_folder

QWEN3 = json.loads(files()["config.json"])


def _write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    return folder


def test_the_embedded_model_is_what_its_maker_makes() -> None:
    """Nobody edits the packaged files by hand and loses it at the next making."""
    folder = model_folder("embedded")
    names = {path.name for path in folder.glob("*.json")}

    assert {name: (folder / name).read_text(encoding="utf-8") for name in names} == files()


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """No network is asked for a model that is here."""
    assert model_folder(str(_write(tmp_path))) == tmp_path


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    """A wrong path is said to be wrong before anything loads."""
    with pytest.raises(ConfigError, match=r"without a config\.json"):
        model_folder(str(tmp_path))


def test_what_is_neither_folder_nor_hub_id_names_the_path_tried() -> None:
    """A typing error in a path does not become a question to the hub."""
    with pytest.raises(ConfigError, match="tried /no/such/model/here"):
        model_folder("/no/such/model/here")


def test_a_hub_id_that_cannot_be_had_names_both_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, a user learns that the folder was looked for and that the hub did not answer."""
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("outgoing traffic is disabled")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"tried .*no-one/nothing.*outgoing traffic is disabled"):
        model_folder("no-one/nothing")


def test_only_data_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub repository's Python files and pickles never reach this machine."""
    import huggingface_hub

    asked: list[list[str]] = []

    def download(_: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    assert model_folder("owner/name") == tmp_path
    assert asked == [["*.json", "*.safetensors", "*.jinja"]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architecture none"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "default, llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, ["linear"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ["llama3", "low_freq_factor"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor=0.5"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "float32"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"use_sliding_window": True}, ["use_sliding_window=True"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
    ],
)
def test_what_we_would_compute_wrongly_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: list[str]
) -> None:
    """Nobody measures a model that silently computes something else."""
    with pytest.raises(ConfigError) as error:
        read_model_config(_write(tmp_path, **changes))

    assert all(word in str(error.value) for word in named)


def test_older_and_newer_rope_spellings_mean_the_same(tmp_path: Path) -> None:
    """Checkpoints saved before transformers 5 load with their own rotary base and scaling."""
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    newer = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    older = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}

    configs = [read_model_config(_write(tmp_path, **changes)) for changes in (newer, older)]

    assert configs[0] == configs[1]
    assert configs[0].rope_theta == 5e5


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [(7, None, (7,)), (7, {"eos_token_id": [8, 9]}, (8, 9)), (7, {}, (7,)), (None, None, ()), (0, None, (0,))],
)
def test_the_end_tokens_are_the_generation_configs_first(
    tmp_path: Path, own: int | None, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    """A chat model stops at the end of its turn."""
    folder = _write(tmp_path, eos_token_id=own)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))

    assert read_model_config(folder).eos_token_ids == expected


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_transformers_default(tmp_path: Path, name: str) -> None:
    """A `config.json` that states only what differs gives the shape that transformers would build."""
    from transformers import AutoConfig

    architecture = f"{name.capitalize()}ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": name}))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), read_model_config(tmp_path)

    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    same = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    for field in (*same, "tie_word_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field)


def test_the_embedded_tokenizer_is_one_token_a_byte() -> None:
    """Prompt lengths are exact, every text comes back, and transformers reads the same files."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("embedded"))
    text = "Zürich, 北京 \n\t<b>"
    ids = tokenizer.encode(text)

    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == QWEN3["vocab_size"]
    assert all(tokenizer.decode([index]) for index in range(512))


def test_the_embedded_chat_template_ends_where_the_model_stops() -> None:
    """A chat turn opens and closes with single tokens, and the closing one is an end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("embedded"))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    assert ids == [start, *b"user\nhi", end, *b"\n", start, *b"assistant\n"]
    assert end in read_model_config(model_folder("embedded")).eos_token_ids
