"""Text to token ids and back, with the tokenizer and the chat template that lie in the model's folder. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from engine.config import ConfigError

if TYPE_CHECKING:
    from jinja2 import Template

_REPLACEMENT = "\ufffd"
_MOST_HELD_BACK_TOKENS = 8
"""A character takes at most 4 bytes; a longer run of unfinished tokens never becomes one."""


class ChatTemplateError(ValueError):
    """Messages that the model's chat template cannot take."""


class TextTokenizer:
    """A Hugging Face fast tokenizer, read from `tokenizer.json`.

    Raises:
        ConfigError: for a folder without one, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing: a model folder must hold a fast tokenizer")
        self._folder = folder
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a fast tokenizer: {error}") from error
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Most characters that one token stands for. Unit: characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; with special tokens where the tokenizer adds any (none for a rendered chat)."""
        # As a batch of one: that lets other threads run meanwhile, and counts no characters, a quarter of the time.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out; bytes that form no character become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """What one token stands for by itself, special ones too."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one request."""
        return Detokenizer(self)

    def render_chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt of a conversation, up to where the assistant's answer begins.

        Raises:
            ChatTemplateError: if the model has no template, or the template refuses the messages or fails on them.
        """
        try:
            template = self._chat_template
            if template is not None:
                return template.render(
                    messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens
                )
        except Exception as error:  # a template is a program of the model's author, which may raise anything
            raise ChatTemplateError(f"the chat template cannot take these messages: {error}") from error
        raise ChatTemplateError("this model has no chat template: use /v1/completions")

    @cached_property
    def _config(self) -> dict[str, object]:
        path = self._folder / "tokenizer_config.json"
        loaded: dict[str, object] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return loaded

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        values = {name: self._config.get(name) for name in names}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @cached_property
    def _chat_template(self) -> Template | None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        path = self._folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else self._config.get("chat_template")
        if not isinstance(source, str):
            return None

        def refuse(message: str) -> None:
            raise TemplateError(message)

        # The options and the function that Hugging Face templates are written for.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        return environment.from_string(source)


class Detokenizer:
    """Turns one request's tokens into text as they come; text so far is never taken back.

    Tokens kept:  [0, _num_given)    decoded before; they decide the spacing of what follows
                  [_num_given, end)  held back: their bytes do not form a character yet
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._num_given = 0
        self._given_text = ""

    def push(self, token_id: int, *, is_last: bool = False) -> str:
        """The text that becomes certain with this token; empty while a character is incomplete."""
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids)
        num_held_back = len(self._token_ids) - self._num_given
        if text.endswith(_REPLACEMENT) and num_held_back < _MOST_HELD_BACK_TOKENS and not is_last:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What was held back, when no token follows that could complete it."""
        return self._give(self._tokenizer.decode(self._token_ids))

    def _give(self, text: str) -> str:
        """All of `text`, which is that of the tokens kept, but what was given before."""
        new = text[len(self._given_text) :]
        self._token_ids = self._token_ids[self._num_given :]
        self._num_given = len(self._token_ids)
        self._given_text = self._tokenizer.decode(self._token_ids)
        return new
