"""Random-weight checkpoints that every engine can load: no download, the same weights for all."""

from __future__ import annotations

import itertools
import string
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder's shape."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    head_dim: int
    num_kv_heads: int = 4


SHAPES = (
    Shape(name="4-M", hidden_size=256, num_layers=4, vocab_size=4096, head_dim=32),
    Shape(name="29-M", hidden_size=512, num_layers=8, vocab_size=8192, head_dim=64),
)

WIDE_KV = Shape(name="11-M-wide-kv", hidden_size=256, num_layers=4, vocab_size=4096, head_dim=256, num_kv_heads=8)
"""Small to compute with, but a token takes 64 KiB of KV cache, a fifth of what a model of 8 billion parameters takes:
a share of the machine's memory then decides how many requests fit."""


def make_checkpoint(shape: Shape, folder: Path) -> int:
    """Save a seeded Qwen3 and a tokenizer with as many tokens into `folder`; returns the number of parameters."""
    set_seed(0)
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
        num_attention_heads=8,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    _tokenizer(shape.vocab_size).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def save_tokenizer(folder: Path, *, vocab_size: int = 4096) -> None:
    """Save the tokenizer alone, for clients that want one to make prompts with."""
    _tokenizer(vocab_size).save_pretrained(folder)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: the 256 bytes, then pairs of letters, then triples, as far as the vocabulary goes."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = itertools.chain.from_iterable(itertools.product(string.ascii_lowercase, repeat=n) for n in (2, 3))
    merges = []
    for letters in itertools.islice(words, vocab_size - len(vocabulary)):
        word = "".join(letters)
        merges.append((word[:-1], word[-1]))
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
