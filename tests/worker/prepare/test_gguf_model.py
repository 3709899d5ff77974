from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagemill_testing.tiny_gguf import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    Kind,
    TinyGguf,
)
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import open_gguf
from pagemill_worker.prepare.gguf_model import prepare_gguf
from pagemill_worker.prepare.gguf_rope import llama3_factors
from pagemill_worker.prepare.workspace import Workspace

KINDS = [
    Kind.F32,
    Kind.F16,
    Kind.BF16,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q8_0,
    Kind.Q2_K,
    Kind.Q3_K,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
    Kind.IQ4_NL,
    Kind.IQ4_XS,
]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def prepare(tiny: TinyGguf, folder: Path) -> Path:
    prepared = folder / "prepared"
    prepared.mkdir()
    prepare_gguf(open_gguf(tiny.write(folder / "tiny.gguf")), Workspace(prepared, lambda what, share: None))
    return prepared


def reference(tiny: TinyGguf, **changes: Any) -> LlamaForCausalLM:
    """Made from the dequantised weights with transformers alone."""
    config = LlamaConfig(
        vocab_size=tiny.vocabulary.size,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tiny.tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    for name, value in changes.items():
        setattr(config, name, value)
    model = LlamaForCausalLM(config).eval()
    state = {name: torch.from_numpy(values.copy()) for name, values in tiny.weights.items()}
    if tiny.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def assert_equal_logits(prepared: Path, expected: LlamaForCausalLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(prepared).eval()
    assert model.dtype == torch.float32
    tokens = torch.randint(0, expected.config.vocab_size, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_logits_equal_those_of_the_dequantised_weights(tmp_path: Path, kind: Kind) -> None:
    tiny = TinyGguf(kind=kind)
    assert_equal_logits(prepare(tiny, tmp_path), reference(tiny))


def test_weights_are_kept_to_the_bit(tmp_path: Path) -> None:
    tiny = TinyGguf(kind=Kind.Q4_1)
    weights = load_file(prepare(tiny, tmp_path) / "model.safetensors")
    assert weights.keys() == tiny.weights.keys()
    for name, values in tiny.weights.items():
        np.testing.assert_array_equal(weights[name], values)


def test_an_output_projection_of_its_own_is_used(tmp_path: Path) -> None:
    tiny = TinyGguf(tied=False)
    assert_equal_logits(prepare(tiny, tmp_path), reference(tiny))


def test_biases_are_kept_and_permuted_like_their_weights(tmp_path: Path) -> None:
    tiny = TinyGguf(biases=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"))
    prepared = prepare(tiny, tmp_path)
    config = json.loads((prepared / "config.json").read_text())
    assert config["attention_bias"]
    assert config["mlp_bias"]
    assert_equal_logits(prepared, reference(tiny, attention_bias=True, mlp_bias=True))


def test_llama3_rotary_factors_are_recognised(tmp_path: Path) -> None:
    tiny = TinyGguf()
    factors = llama3_factors(10000.0, HEAD_DIM // 2, **LLAMA3).astype(np.float32)
    tiny.tensors["rope_freqs.weight"] = (factors, Kind.F32)
    prepared = prepare(tiny, tmp_path)
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}
    assert json.loads((prepared / "config.json").read_text())["rope_parameters"] == rope
    assert_equal_logits(prepared, reference(tiny, rope_parameters=rope))


def test_other_rotary_factors_are_used_as_they_are(tmp_path: Path) -> None:
    tiny = TinyGguf()
    factors = np.linspace(1, 3, HEAD_DIM // 2).astype(np.float32)
    tiny.tensors["rope_freqs.weight"] = (factors, Kind.F32)
    model = AutoModelForCausalLM.from_pretrained(prepare(tiny, tmp_path))
    plain = 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), plain / factors, rtol=1e-6)


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"llama.rope.freq_base": None}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"llama.rope.freq_base": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
    ids=["none", "theta", "linear", "yarn"],
)
def test_rotary_scaling(tmp_path: Path, metadata: dict[str, Any], rope: dict[str, Any]) -> None:
    tiny = TinyGguf(metadata=metadata)
    assert_equal_logits(prepare(tiny, tmp_path), reference(tiny, rope_parameters=rope))


def test_end_tokens_of_turn_and_message_count_where_the_file_names_them(tmp_path: Path) -> None:
    tiny = TinyGguf(metadata={"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2})
    generation = json.loads((prepare(tiny, tmp_path) / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 2}


@pytest.mark.parametrize(
    ("metadata", "cause"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; supported in GGUF files: llama"),
        ({"general.architecture": "LLaMa"}, "architecture 'LLaMa'"),
        ({"split.count": 3}, "is one of 3 parts of a split model"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "two"}, "llama.block_count is a str, not a int"),
        ({"llama.block_count": 4_000_000_000}, "4000000000 layers"),
        ({"llama.block_count": 1}, "tensors that LlamaForCausalLM does not have: blk.1.attn_k.weight, .* and 6 more"),
        ({"llama.block_count": 3}, "lacks the tensor 'blk.2.attn_norm.weight'"),
        (
            {"llama.embedding_length": 128},
            r"'token_embd.weight' has shape \[\d+, 256\], its metadata says .* 128\]",
        ),
        ({"llama.attention.head_count": 0}, "head_count is 0, less than 1"),
        ({"llama.attention.head_count_kv": 3}, "cannot share 3 key heads"),
        ({"llama.rope.dimension_count": 63}, "heads of 63 dimensions"),
        ({"llama.rope.dimension_count": 32, "llama.attention.key_length": 64}, "only a part of each head"),
        ({"llama.attention.value_length": 32}, "keys and values of different length"),
        ({"llama.context_length": 0}, "context_length is 0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
        ({"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0}, "by `su`, which is not supported"),
        ({"tokenizer.ggml.eos_token_id": 70000}, "eos_token_id is 70000, but the vocabulary has"),
    ],
)
def test_what_is_not_supported_or_damaged_is_refused_with_its_cause(
    tmp_path: Path, metadata: dict[str, Any], cause: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"tiny\.gguf.*{cause}"):
        prepare(TinyGguf(metadata=metadata), tmp_path)


def test_a_tensor_that_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    tiny = TinyGguf()
    tiny.tensors["blk.0.attn_q_norm.weight"] = (np.ones(HEAD_DIM, np.float32), Kind.F32)
    with pytest.raises(ConfigurationError, match=r"does not have: blk\.0\.attn_q_norm\.weight$"):
        prepare(tiny, tmp_path)


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    tiny = TinyGguf()
    data, kind = tiny.tensors["token_embd.weight"]
    tiny.tensors["token_embd.weight"] = (data[:-5], kind)
    with pytest.raises(ConfigurationError, match=r"is damaged: \d+ tokens, but \d+ embeddings"):
        prepare(tiny, tmp_path)
