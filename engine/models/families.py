"""What the `config.json` of each architecture says; what it leaves out takes transformers' default."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat

from engine.config import ConfigError
from engine.models.rope import Rope, Size, read_rope

Theta = Annotated[float, Field(gt=1)]
Activation = Literal["silu", "gelu_pytorch_tanh"]
LayerType = Literal["full_attention", "sliding_attention"]
EosTokenId = int | list[int] | None
RopeParameters = dict[str, object] | None


class Family(BaseModel):
    """What all architectures have in common."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    has_qk_norm: ClassVar[bool] = False
    """Whether queries and keys are normed per head."""

    has_output_norms: ClassVar[bool] = False
    """Whether what attention and the MLP give is normed before it is added."""

    norm_offset: ClassVar[float] = 0.0
    """Added to the weight of every norm."""

    weight_prefix: ClassVar[str] = ""
    """What the names of the weights begin with."""

    fits_float16: ClassVar[bool] = True
    """Whether what its layers compute stays within float16's largest number, 65504."""

    hidden_size: Size = 4096
    num_hidden_layers: Size = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    vocab_size: Size
    max_position_embeddings: Size
    original_max_position_embeddings: Size | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: Activation = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    layer_types: list[LayerType] | None = None
    rope_theta: Theta | None = None
    rope_parameters: RopeParameters = None
    rope_scaling: RopeParameters = None
    partial_rotary_factor: float | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: EosTokenId = None

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the query, key and value projections add a bias."""
        return self.attention_bias

    @property
    def activation(self) -> Activation:
        """What the gate of the MLP goes through."""
        return self.hidden_act

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by."""
        return 1 / math.sqrt(self.head_size)

    @property
    def embedding_scale(self) -> float:
        """What a token's embedding is multiplied by."""
        return 1.0

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads: as many as query heads where nothing is said."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Values of one head: hidden size over heads where nothing is said."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def window(self) -> int | None:
        """How many positions a token sees in layers that slide, itself included."""
        return None

    def check_heads(self) -> None:
        """Refuse heads that do not divide what they have to.

        Raises:
            ConfigError: naming both numbers.
        """
        heads, kv_heads = self.num_attention_heads, self.num_kv_heads
        if heads % kv_heads:
            raise ConfigError(f"num_attention_heads={heads} is not divisible by num_key_value_heads={kv_heads}")
        if self.head_dim is None and self.hidden_size % heads:
            raise ConfigError(f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={heads}")
        if self.head_size % 2:
            raise ConfigError(f"head_dim={self.head_size} is odd: rotary embeddings turn pairs")

    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer, None where a token sees all; here all layers slide, or none."""
        kind = "full_attention" if self.window is None else "sliding_attention"
        if set(self.layer_types or ()) - {kind}:
            raise ConfigError(f"layer_types={self.layer_types} is not supported here; supported: {kind} in all layers")
        return (self.window,) * self.num_hidden_layers

    def layer_ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding of each layer; here the same for all."""
        said = {
            "partial_rotary_factor": self.partial_rotary_factor,
            **(self.rope_scaling or self.rope_parameters or {}),
        }
        if self.original_max_position_embeddings is not None:
            said["original_max_position_embeddings"] = self.original_max_position_embeddings
        return (self._rope(said, self.rope_theta or 10000.0),) * self.num_hidden_layers

    def _rope(self, said: dict[str, object], rope_theta: float) -> Rope:
        return read_rope(said, rope_theta=rope_theta, max_position_embeddings=self.max_position_embeddings)

    def num_positions(self) -> int:
        """Most positions of a request."""
        return self.layer_ropes()[0].num_positions(self.max_position_embeddings)

    def _windows_by_type(self, layer_types: Sequence[LayerType]) -> tuple[int | None, ...]:
        if len(layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(layer_types)} entries, but num_hidden_layers={self.num_hidden_layers}"
            )
        slides = [kind == "sliding_attention" for kind in layer_types]
        if any(slides) and self.window is None:
            raise ConfigError("layer_types has sliding_attention, but there is no sliding_window (in use)")
        return tuple(self.window if slide else None for slide in slides)


class Llama(Family):
    """Llama 1 to 3, and the many that took its shape (transformers: `LlamaConfig`)."""

    intermediate_size: Size = 11008
    vocab_size: Size = 32000
    max_position_embeddings: Size = 2048
    eos_token_id: EosTokenId = 2


class Mistral(Family):
    """Mistral 7B: Llama with one window for all layers (transformers: `MistralConfig`)."""

    num_key_value_heads: Size | None = 8
    intermediate_size: Size = 14336
    vocab_size: Size = 32000
    max_position_embeddings: Size = 131072
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    sliding_window: Size | None = 4096
    eos_token_id: EosTokenId = 2

    @property
    def window(self) -> int | None:
        """`sliding_window`."""
        return self.sliding_window


class Qwen(Family):
    """What Qwen 2 and 3 share: the later layers may slide."""

    num_key_value_heads: Size | None = 32
    intermediate_size: Size = 22016
    vocab_size: Size = 151936
    max_position_embeddings: Size = 32768
    mlp_bias: Literal[False] = False
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: NonNegativeInt = 28

    @property
    def window(self) -> int | None:
        """`sliding_window`, where it is in use."""
        return self.sliding_window if self.use_sliding_window else None

    def layer_windows(self) -> tuple[int | None, ...]:
        """By `layer_types`, else every layer from `max_window_layers` on slides."""
        if self.layer_types is not None:
            return self._windows_by_type(self.layer_types)
        first = min(self.max_window_layers, self.num_hidden_layers)
        return (None,) * first + (self.window,) * (self.num_hidden_layers - first)


class Qwen2(Qwen):
    """Qwen 1.5 to 2.5: queries, keys and values are biased (transformers: `Qwen2Config`)."""

    attention_bias: Literal[False] = False

    @property
    def has_qkv_bias(self) -> bool:
        """Always."""
        return True


class Qwen3(Qwen):
    """Qwen 3: queries and keys are normed (transformers: `Qwen3Config`)."""

    has_qk_norm: ClassVar[bool] = True

    head_dim: Size | None = 128


class NestedRopes(BaseModel):
    """Rotary parameters by the type of the layer."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    full_attention: RopeParameters = None
    sliding_attention: RopeParameters = None


class Gemma3(Family):
    """The text part of Gemma 3 (transformers: `Gemma3TextConfig`)."""

    has_qk_norm: ClassVar[bool] = True
    has_output_norms: ClassVar[bool] = True
    norm_offset: ClassVar[float] = 1.0
    fits_float16: ClassVar[bool] = False

    hidden_size: Size = 2304
    num_hidden_layers: Size = 26
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    intermediate_size: Size = 9216
    vocab_size: Size = 262208
    max_position_embeddings: Size = 131072
    hidden_activation: Activation = "gelu_pytorch_tanh"
    mlp_bias: Literal[False] = False
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: PositiveFloat = 256.0
    sliding_window: Size | None = 4096
    sliding_window_pattern: Size = 6
    rope_local_base_freq: Theta | None = None
    final_logit_softcapping: None = None
    attn_logit_softcapping: None = None
    use_bidirectional_attention: Literal[False] | None = None
    eos_token_id: EosTokenId = 1

    @property
    def activation(self) -> Activation:
        """Under a name of its own."""
        return self.hidden_activation

    @property
    def query_scale(self) -> float:
        """By a number of its own, not the head's size."""
        return 1 / math.sqrt(self.query_pre_attn_scalar)

    @property
    def embedding_scale(self) -> float:
        """Embeddings are as large as what layers add to them."""
        return math.sqrt(self.hidden_size)

    @property
    def window(self) -> int | None:
        """`sliding_window`."""
        return self.sliding_window

    def layer_windows(self) -> tuple[int | None, ...]:
        """By `layer_types`, else every sixth layer (`sliding_window_pattern`) sees all."""
        return self._windows_by_type(self.layer_types or self._pattern())

    def _pattern(self) -> list[LayerType]:
        every = self.sliding_window_pattern
        layers = range(1, self.num_hidden_layers + 1)
        return ["sliding_attention" if layer % every else "full_attention" for layer in layers]

    def layer_ropes(self) -> tuple[Rope, ...]:
        """One for layers that see all, one for those that slide; the older `rope_scaling` is for the first."""
        nested = NestedRopes.model_validate(self.rope_parameters or {})
        full = self._rope({**(nested.full_attention or {}), **(self.rope_scaling or {})}, self.rope_theta or 1e6)
        sliding = self._rope(nested.sliding_attention or {}, self.rope_local_base_freq or 1e4)
        return tuple(full if window is None else sliding for window in self.layer_windows())

    def num_positions(self) -> int:
        """`max_position_embeddings` counts what is stretched already."""
        return self.max_position_embeddings


class Gemma3Multimodal(Gemma3):
    """Gemma 3 with a vision tower, which is left alone: it reads text only."""

    weight_prefix: ClassVar[str] = "language_model."


FAMILIES: dict[str, type[Family]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3Multimodal,
}
"""Every architecture that is computed, under the name `architectures` gives it."""
