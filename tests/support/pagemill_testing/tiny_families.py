"""Tiny random checkpoints of every family that the worker's fast path runs, made by transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from pagemill_testing.tiny_models import VOCAB

WINDOW = 11
"""Of the families that have one: no multiple of a block."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "initializer_range": 0.12}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama with gelu": ("Llama", {"hidden_act": "gelu", "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 32}),
    "mistral without window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": ("Qwen2", QWEN_WINDOWS),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 with windows and biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, **QWEN_WINDOWS}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3 with windows": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "phi3": ("Phi3", {"original_max_position_embeddings": 256}),
    "phi3, a part turned": (
        "Phi3",
        {
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gemma3 with a scaled half": (
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 8.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
"""Name in transformers, and what its configuration has beside `SIZES`."""


def tiny_family(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of ``name``, one of `FAMILIES`, with ``changes`` to its configuration."""
    prefix, fields = FAMILIES[name]
    kind = f"{prefix}Text" if prefix == "Gemma3" else prefix
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **fields, **changes})
    torch.manual_seed(seed)
    config._attn_implementation = "eager"  # the one that does all that a configuration can ask for
    return randomised(getattr(transformers, f"{prefix}ForCausalLM")(config).eval())


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Norms and biases as well: transformers starts them at 0 and 1."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name or "ln_" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    return model
