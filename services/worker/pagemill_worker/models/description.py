"""What a decoder of the Llama kind is: sizes, variants, and the names of its weights in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagemill_worker.models.rotary import RopeConfig

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What sets one layer apart from another.

    Attributes:
        window: tokens that a token attends to, itself among them; None means all before it.
        rope: how queries and keys are turned, or None where they are not.
    """

    window: int | None
    rope: RopeConfig | None


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's weights, without ``model.layers.N.`` and ``.weight``. None: the layer has no such part.

    Attributes:
        qkv, gate_up: one name where the checkpoint holds them fused (queries, keys, values; gate, up), else one each.
        attention_norm, mlp_norm: before attention and before the MLP.
        attention_out_norm, mlp_out_norm: of what they give, before it is added to the residual.
        query_norm, key_norm: of each head, before it is turned.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder. Names are those of transformers where it has one.

    Attributes:
        attention_scale: factor of the scores.
        attention_soft_cap, logit_soft_cap: ``cap * tanh(x / cap)`` of scores and logits; None means off.
        norm_offset: added to the weights of every norm.
        embedding_scale: factor of the embedded tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    names: LayerNames
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_scale: float
    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
