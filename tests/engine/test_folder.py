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
_LLAMA = {"architectures": ["LlamaForCausalLM"], "head_dim": None, "num_hidden_layers": 4}
_MISTRAL = {"architectures": ["MistralForCausalLM"]}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
_MIXED = ["sliding_attention", "full_attention"] * 2
_GEMMA = {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": None, "sliding_window_pattern": 2}


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


@pytest.mark.parametrize("model", ["~no-such-user-here/model", "a" * 5000])
def test_a_path_that_cannot_be_looked_for_is_refused(model: str) -> None:
    """One readable line, where the system itself refuses the name."""
    with pytest.raises(ConfigError, match="cannot be looked for"):
        model_folder(model)


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
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "MistralForCausalLM"]),
        ({"architectures": None}, ["architecture none", "Gemma3ForCausalLM"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ["longrope", "default, dynamic, linear"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor is missing"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor=0.5"]),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor=0.25"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "float32, bfloat16 or float16"]),
        ({"hidden_act": "relu"}, ["hidden_act='relu'", "'silu' or 'gelu_pytorch_tanh'"]),
        ({"mlp_bias": True}, ["mlp_bias=True", "supported: False"]),
        ({**_QWEN2, "attention_bias": True}, ["attention_bias=True"]),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, ["linear_attention", "sliding_attention"]),
        ({"layer_types": ["sliding_attention"] * 4}, ["sliding_attention", "no sliding_window"]),
        ({"layer_types": ["full_attention"]}, ["layer_types has 1 entries", "num_hidden_layers=4"]),
        ({**_LLAMA, "layer_types": ["sliding_attention"] * 4}, ["sliding_attention", "full_attention in all"]),
        ({**_MISTRAL, "layer_types": ["full_attention"] * 4}, ["full_attention", "sliding_attention in all"]),
        ({**_GEMMA, "final_logit_softcapping": 30.0}, ["final_logit_softcapping=30.0", "supported: null"]),
        ({**_GEMMA, "attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0"]),
        ({**_GEMMA, "use_bidirectional_attention": True}, ["use_bidirectional_attention=True"]),
        ({**_GEMMA, "sliding_window": None}, ["no sliding_window"]),
        ({**_GEMMA, "rope_parameters": {"rope_type": "default"}}, ["rope_type='default' is not known"]),
    ],
)
def test_what_we_would_compute_wrongly_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: list[str]
) -> None:
    """Nobody measures a model that silently computes something else."""
    with pytest.raises(ConfigError) as error:
        read_model_config(_write(tmp_path, **changes))

    assert all(word in str(error.value) for word in (*named, "config.json"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads": "6"}, "num_attention_heads='6': Input should be a valid integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: Input should be greater than 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": 384.5}, "hidden_size=384.5"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"vocab_size": 10**30}, "Input should be less than 2147483648"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "factor=1e+308"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-9}}, "factor leaves 0 positions"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6 is not divisible by num_key_value_heads=4"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 384, **_LLAMA}, "384 is not divisible"),
        ({"head_dim": 63}, "head_dim=63 is odd"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures='Qwen3ForCausalLM'"),
        ({"rope_parameters": [1]}, "rope_parameters="),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
        ({"quantization_config": "gptq"}, "quantization_config='gptq'"),
    ],
)
def test_a_damaged_config_names_what_is_wrong(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """A hand-edited config.json gives one readable line, not a traceback."""
    with pytest.raises(ConfigError) as error:
        read_model_config(_write(tmp_path, **changes))

    assert named in str(error.value)
    assert "config.json: " in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """A download that was cut off is named."""
    (_write(tmp_path) / name).write_bytes(content)

    with pytest.raises(ConfigError, match=name):
        read_model_config(tmp_path)


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
    outside = {**older, "rope_scaling": {"type": "llama3", **scaling, "original_max_position_embeddings": 1}}
    outside["original_max_position_embeddings"] = 8192

    configs = [read_model_config(_write(tmp_path, **changes)) for changes in (newer, older, outside)]

    assert configs[0] == configs[1] == configs[2]
    assert configs[0].layer_ropes[0].rope_theta == 5e5


def test_older_and_newer_gemma_ropes_mean_the_same(tmp_path: Path) -> None:
    """Gemma's two rotary bases are found in checkpoints of before and after transformers 5."""
    linear = {"rope_type": "linear", "factor": 8.0}
    newer = {
        "rope_parameters": {
            "full_attention": {**linear, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    older = {"rope_parameters": None, "rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": linear}

    configs = [read_model_config(_write(tmp_path, **{**_GEMMA, **changes})) for changes in (newer, older)]

    assert configs[0] == configs[1]
    assert [rope.rope_theta for rope in configs[0].layer_ropes] == [2e4, 2e6, 2e4, 2e6]
    assert configs[0].max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": 8}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": _MIXED}, (8, None, 8, None)),
        ({**_LLAMA, "sliding_window": 8}, (None,) * 4),
        ({**_MISTRAL, "sliding_window": 8}, (8,) * 4),
        ({**_MISTRAL, "sliding_window": None}, (None,) * 4),
        (_MISTRAL, (4096,) * 4),
        ({**_GEMMA, "sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None, 8)),
        ({**_GEMMA, "sliding_window": 8, "layer_types": _MIXED}, (8, None, 8, None)),
    ],
)
def test_windows_are_where_transformers_puts_them(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    """Each family says in its own way which layers slide."""
    assert read_model_config(_write(tmp_path, **changes)).layer_windows == expected


def test_a_model_that_also_sees_is_read_for_its_text(tmp_path: Path) -> None:
    """A Gemma 3 of 4 billion parameters and more keeps the text model in a part of its own."""
    text = {"hidden_size": 64, "num_hidden_layers": 7, "vocab_size": 99}
    said = {"architectures": ["Gemma3ForConditionalGeneration"], "dtype": "bfloat16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = read_model_config(tmp_path)

    assert (config.hidden_size, config.num_layers, config.vocab_size) == (64, 7, 99)
    assert config.checkpoint_dtype == "bfloat16"
    assert config.weight_prefix == "language_model."


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


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3"])
def test_what_a_config_leaves_out_is_transformers_default(tmp_path: Path, name: str) -> None:
    """A `config.json` that states only what differs gives the shape that transformers would build."""
    from transformers import AutoConfig

    model_type = "gemma3_text" if name == "Gemma3" else name.lower()
    said = {"architectures": [f"{name}ForCausalLM"], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(said))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), read_model_config(tmp_path)

    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    same = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    for field in (*same, "tie_word_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field)
    types = getattr(theirs, "layer_types", None) or ["all"] * theirs.num_hidden_layers
    ropes = [theirs.rope_parameters.get(kind, theirs.rope_parameters)["rope_theta"] for kind in types]
    assert [rope.rope_theta for rope in ours.layer_ropes] == ropes
    window = getattr(theirs, "sliding_window", None)
    assert ours.layer_windows == tuple(None if kind == "full_attention" else window for kind in types)


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
