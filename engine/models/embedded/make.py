"""Writes the embedded model's files: `python -m engine.models.embedded.make`. No download, no training.

The tokenizer gives one token to each byte of a text: ids 0 to 255 are the bytes, then come the special tokens. No text
encodes to the ids after those, but a model with made-up weights draws them; each stands for a syllable, so that its
output is mostly readable.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)
VOCAB_SIZE = 512
_EOS_TOKEN_IDS = [256 + SPECIAL.index(IM_END), 256 + SPECIAL.index(END_OF_TEXT)]
_CONTEXT_TOKENS = 2048

_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "hidden_act": "silu",
    "max_position_embeddings": _CONTEXT_TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": _EOS_TOKEN_IDS[0],
    "pad_token_id": _EOS_TOKEN_IDS[1],
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def _syllables() -> list[str]:
    """Enough distinct syllables to fill the vocabulary, half of them opening a word."""
    space = _byte_characters()[ord(" ")]
    pairs = [consonant + vowel for consonant in "bcdfghjklmnprstvwyz" for vowel in "aeiou"]
    closed = [vowel + consonant for vowel in "aeiou" for consonant in "bcdfghklmnprst"]
    return list(islice([*pairs, *(space + pair for pair in pairs), *closed], VOCAB_SIZE - 256 - len(SPECIAL)))


def _tokenizer() -> Tokenizer:
    tokens = [*_byte_characters(), *SPECIAL, *_syllables()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def files() -> dict[str, str]:
    """The text of each file of the embedded model, by name."""
    described = {
        "config.json": _CONFIG,
        "generation_config.json": {"eos_token_id": _EOS_TOKEN_IDS, "pad_token_id": _EOS_TOKEN_IDS[1]},
        "tokenizer.json": json.loads(_tokenizer().to_str()),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _CONTEXT_TOKENS,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    }
    return {name: json.dumps(value, indent=1, ensure_ascii=False) + "\n" for name, value in described.items()}


if __name__ == "__main__":
    for name, text in files().items():
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")
