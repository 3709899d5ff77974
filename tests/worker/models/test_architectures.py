"""From config.json to the description of a decoder, in the forms that checkpoints have it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pagemill_testing.tiny_families import FAMILIES, SIZES, WINDOW, tiny_family
from pagemill_testing.tiny_models import make_runner, save, tiny_llama

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.models.architectures import ARCHITECTURES
from pagemill_worker.models.description import DecoderConfig


def read(name: str, **config: Any) -> DecoderConfig:
    return ARCHITECTURES[name]({**SIZES, **config})


def windows(description: DecoderConfig) -> list[int | None]:
    return [layer.window for layer in description.layers]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_leaves_out_is_its_own_default(name: str) -> None:
    """Older versions saved only what is not the default of every model, so `tie_word_embeddings` of some is missing."""
    config = tiny_family(name).config
    fields = config.to_dict()
    default = type(config)().tie_word_embeddings
    whole = ARCHITECTURES[fields["architectures"][0] if fields.get("architectures") else type_of(name)](fields)
    assert whole.tie_word_embeddings == config.tie_word_embeddings
    del fields["tie_word_embeddings"]
    assert ARCHITECTURES[type_of(name)](fields).tie_word_embeddings == default


def type_of(name: str) -> str:
    return f"{FAMILIES[name][0]}ForCausalLM"


def test_windows_of_older_files() -> None:
    assert windows(read("MistralForCausalLM")) == [4096] * 3
    assert windows(read("MistralForCausalLM", sliding_window=None)) == [None] * 3
    assert windows(read("Qwen2ForCausalLM", sliding_window=WINDOW)) == [None] * 3
    some = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    assert windows(read("Qwen3ForCausalLM", **some)) == [None, None, WINDOW]
    assert windows(read("Gemma2ForCausalLM", sliding_window=WINDOW)) == [WINDOW, None, WINDOW]
    gemma3 = read("Gemma3ForCausalLM", sliding_window=WINDOW, sliding_window_pattern=3)
    assert windows(gemma3) == [WINDOW, WINDOW, None]


def test_rotary_bases_of_older_files() -> None:
    old = read(
        "Gemma3ForCausalLM", rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"type": "linear", "factor": 8}
    )
    assert [layer.rope.theta for layer in old.layers if layer.rope] == [2e4] * 3
    old = read(
        "Gemma3ForCausalLM",
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
    )
    near, far = (layer.rope for layer in old.layers[:2])
    assert near is not None
    assert far is not None
    assert (near.theta, near.rope_type, far.theta, far.rope_type, far.factor) == (2e4, "default", 5e5, "linear", 8.0)
    assert [bool(layer.rope) for layer in read("SmolLM3ForCausalLM", no_rope_layer_interval=2).layers] == [1, 0, 1]
    su = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = read("Phi3ForCausalLM", rope_scaling=su, original_max_position_embeddings=64)
    assert phi.layers[0].rope is not None
    assert (phi.layers[0].rope.rope_type, phi.layers[0].rope.original_length) == ("longrope", 64)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0, not a positive number"),
        (
            "Gemma2ForCausalLM",
            {"layer_types": ["full_attention"]},
            "layer_types is not a list of one entry for each of 3",
        ),
        ("Gemma3ForCausalLM", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' is not supported"),
        ("MistralForCausalLM", {"sliding_window": "many"}, "sliding_window is 'many'"),
        ("Qwen3ForCausalLM", {"use_sliding_window": 1}, "use_sliding_window is 1, not true or false"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers is not a list of one entry for each of 3"),
    ],
)
def test_what_a_family_cannot_be_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(name, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "unnamed architecture"),
        ({"hidden_act": "relu"}, "'relu' is not supported; supported are silu"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "'ntk' is not supported; supported are default, "),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "8 numbers in short_factor, it has no"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.2}}, "3 of 16 elements of a head"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs the number factor"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"intermediate_size": 97}, r"has shape \(96, 64\), config.json calls for \(97, 64\)"),
        ({"attention_bias": True}, "lack the tensor model.layers.0.self_attn.q_proj.bias"),
        ({"num_hidden_layers": 3}, "lack the tensor model.layers.2"),
        ({"tie_word_embeddings": None}, None),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    folder = save(tiny_llama(), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    if message is None:
        make_runner(folder)
    else:
        with pytest.raises(ConfigurationError, match=message):
            make_runner(folder)
