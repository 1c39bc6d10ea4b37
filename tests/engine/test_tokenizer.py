"""Text and token ids, piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.config import ConfigError
from engine.tokenizer import ChatTemplateError, TextTokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_byte_tokenizer(folder: Path, *, chat_template: str | None = None) -> TextTokenizer:
    """A tokenizer with one token for every byte: no character above U+007F is a single token."""
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<end>"}, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return TextTokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """The byte tokenizer, without a template."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@given(text=st.text(max_size=40))
def test_pieces_add_up_to_the_text(tokenizer: TextTokenizer, text: str) -> None:
    """A streamed answer reads as the whole one, and no half character is ever shown."""
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode(text, add_special_tokens=True)]
    assert "".join(pieces) == text


@given(token_ids=st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_are_shown_in_the_end(tokenizer: TextTokenizer, token_ids: list[int]) -> None:
    """A model of random weights says nonsense; nothing breaks, and little is held back."""
    detokenizer = tokenizer.detokenizer()
    for index, token_id in enumerate(token_ids):
        detokenizer.push(token_id, is_last=index == len(token_ids) - 1)
        assert len(detokenizer._token_ids) <= 16


def test_an_unfinished_character_is_held_back(tokenizer: TextTokenizer) -> None:
    """An event with empty text still counts as a token for whoever measures."""
    detokenizer = tokenizer.detokenizer()
    token_ids = tokenizer.encode("é!", add_special_tokens=True)
    assert [detokenizer.push(token_id) for token_id in token_ids] == ["", "é", "!"]


def test_a_chat_template_sees_messages_and_special_tokens(tmp_path: Path) -> None:
    """Templates are written for Hugging Face's names."""
    template = "{% for m in messages %}\n{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}\n"
    tokenizer = write_byte_tokenizer(tmp_path, chat_template=template + "{% if add_generation_prompt %}a:{% endif %}")
    assert tokenizer.render_chat([{"role": "u", "content": "hi"}]) == "u:hi<end>a:"


def test_a_template_can_refuse_and_may_be_missing(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Both are the client's error, with a reason."""
    refusing = write_byte_tokenizer(tmp_path, chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(ChatTemplateError, match="no system role"):
        refusing.render_chat([{"role": "system", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("template", ["{{ 'a' + messages[0].content }}", "{{ 1 // 0 }}", "{{ a.b.c }}", "{% if %}"])
def test_whatever_a_template_trips_over_is_one_kind_of_error(tmp_path: Path, template: str) -> None:
    """A template is a program of the model's author; its faults must not look like the server's."""
    tokenizer = write_byte_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(ChatTemplateError, match="chat template"):
        tokenizer.render_chat([{"role": "user", "content": None}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """At start, by path."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a fast tokenizer"):
        TextTokenizer(tmp_path)
