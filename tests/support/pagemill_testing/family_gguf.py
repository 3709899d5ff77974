"""Tiny models of several families as GGUF files, named by the gguf package's own tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, RopeScalingType, get_tensor_name_map
from gguf.quants import quantize
from transformers import PreTrainedModel

from pagemill_testing.tiny_gguf import Vocabulary, add_entries

Writes = Callable[[GGUFWriter, Any], None]


def _phi3(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_dimension_count(
        int(config.hidden_size // config.num_attention_heads * rope["partial_rotary_factor"])
    )
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        factor = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(factor) / np.log(original))))
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def _gemma2(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _gemma3(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    far = config.rope_parameters["full_attention"]
    if far["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(far["factor"])


KINDS: dict[str, tuple[MODEL_ARCH, Writes]] = {
    "llama": (MODEL_ARCH.LLAMA, lambda writer, config: None),
    "mistral": (MODEL_ARCH.LLAMA, lambda writer, config: None),
    "qwen2": (MODEL_ARCH.QWEN2, lambda writer, config: None),
    "qwen3": (MODEL_ARCH.QWEN3, lambda writer, config: None),
    "smollm3": (MODEL_ARCH.SMOLLM3, lambda writer, config: None),
    "phi3": (MODEL_ARCH.PHI3, _phi3),
    "gemma2": (MODEL_ARCH.GEMMA2, _gemma2),
    "gemma3_text": (MODEL_ARCH.GEMMA3, _gemma3),
}
"""By transformers' model type."""


def write_gguf(
    model: PreTrainedModel,
    vocabulary: Vocabulary,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    **changes: Any,
) -> Path:
    """``model`` as llama.cpp's converter would write it.

    Args:
        kind: of the matrices.
        changes: of the metadata, by whole key.
    """
    config = model.config
    architecture, writes = KINDS[config.model_type]
    writer = GGUFWriter(path, {MODEL_ARCH.LLAMA: "llama"}.get(architecture, architecture.name.lower()))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_quantization_version(2)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writes(writer, config)
    add_entries(writer, {**vocabulary.metadata, **changes})
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    gemma = config.model_type.startswith("gemma")
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        if gemma and name.endswith("norm.weight"):
            values = values + 1
        if architecture in (MODEL_ARCH.LLAMA, MODEL_ARCH.SMOLLM3) and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if values.ndim == 2:
            writer.add_tensor(stored, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
