"""A small GGUF file of random weights for llama.cpp: no download, the same for everybody."""

from __future__ import annotations

import itertools
import string
from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY = 256, 4, 8, 4, 4096
MAX_MODEL_LEN = 4096


def make_gguf(file: Path) -> None:
    """Write a Llama of four million parameters, with a byte-level tokenizer, that takes `MAX_MODEL_LEN` tokens."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(MAX_MODEL_LEN)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(3 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    _add_tokenizer(writer)
    _add_weights(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The 256 bytes, then pairs and triples of letters."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = itertools.chain.from_iterable(itertools.product(string.ascii_lowercase, repeat=n) for n in (2, 3))
    words = ["".join(each) for each in itertools.islice(letters, VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *words])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges([f"{word[:-1]} {word[-1]}" for word in words])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(value=False)


def _add_weights(writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(0)
    kv_size = KV_HEADS * HIDDEN // HEADS

    def add(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", (0.02 * rng.standard_normal((rows, columns))).astype(np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    add("token_embd", VOCABULARY, HIDDEN)
    add_norm("output_norm")
    for layer in range(LAYERS):
        for name, rows, columns in (
            *(("attn_q", HIDDEN, HIDDEN), ("attn_k", kv_size, HIDDEN), ("attn_v", kv_size, HIDDEN)),
            *(("attn_output", HIDDEN, HIDDEN), ("ffn_gate", 3 * HIDDEN, HIDDEN), ("ffn_up", 3 * HIDDEN, HIDDEN)),
            ("ffn_down", HIDDEN, 3 * HIDDEN),
        ):
            add(f"blk.{layer}.{name}", rows, columns)
        add_norm(f"blk.{layer}.attn_norm")
        add_norm(f"blk.{layer}.ffn_norm")
