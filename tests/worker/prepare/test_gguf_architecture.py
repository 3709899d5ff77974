"""Each architecture of GGUF files, from a model that transformers made to that model again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagemill_testing.equality import check_equality
from pagemill_testing.family_gguf import write_gguf
from pagemill_testing.tiny_families import tiny_family
from pagemill_testing.tiny_gguf import Kind, Vocabulary, byte_level_vocabulary, sentencepiece_vocabulary
from pagemill_testing.tiny_models import make_runner
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import open_gguf
from pagemill_worker.prepare.gguf_model import prepare_gguf
from pagemill_worker.prepare.workspace import Workspace

BYTES, PIECES = byte_level_vocabulary("qwen2"), sentencepiece_vocabulary()
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 3.0, 9.0, 15.0],
    },
}
EVERY_SIXTH = {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 32}
FILES: dict[str, tuple[str, Vocabulary, dict[str, Any]]] = {
    "llama": ("llama", BYTES, {}),
    "llama with biases": ("llama with biases", BYTES, {}),
    "mistral is llama": ("mistral without window", PIECES, {}),
    "qwen2": ("qwen2", BYTES, {}),
    "qwen2, untied": ("qwen2", BYTES, {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", BYTES, {}),
    "smollm3": ("smollm3", BYTES, {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "no_rope_layers": None}),
    "phi3": ("phi3", PIECES, {}),
    "phi3 with windows": ("phi3, a part turned", PIECES, {}),
    "phi3 longrope": ("phi3", BYTES, LONGROPE),
    "gemma2": ("gemma2", PIECES, {"query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3", PIECES, EVERY_SIXTH),
    "gemma3 with a scaled half": (
        "gemma3 with a scaled half",
        PIECES,
        {**EVERY_SIXTH, "final_logit_softcapping": None},
    ),
}


def prepared(path: Path) -> Path:
    folder = path.with_suffix("")
    folder.mkdir()
    prepare_gguf(open_gguf(path), Workspace(folder, lambda what, share: None))
    return folder


def made(name: str) -> tuple[PreTrainedModel, Vocabulary]:
    family, vocabulary, changes = FILES[name]
    return tiny_family(family, vocab_size=vocabulary.size, **changes), vocabulary


@pytest.mark.parametrize("name", FILES)
def test_the_model_is_the_one_that_was_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, vocabulary = made(name)
    folder = prepared(write_gguf(reference, vocabulary, tmp_path / "m.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = "LlamaForCausalLM" if name == "mistral is llama" else type(reference).__name__
    assert type(loaded).__name__ == expected
    tokens = torch.randint(0, vocabulary.size, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(loaded(tokens).logits, reference(tokens).logits, rtol=0, atol=2e-5)
    length = getattr(reference.config, "original_max_position_embeddings", 256)  # that of the short factors
    check_equality(loaded, make_runner(folder, max_model_len=length), monkeypatch)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_quantised_matrices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, vocabulary = made(name)
    folder = prepared(write_gguf(reference, vocabulary, tmp_path / "m.gguf", Kind.Q8_0))
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    check_equality(loaded, make_runner(folder), monkeypatch)


@pytest.mark.parametrize(
    ("layers", "hidden_size", "heads", "scalar"), [(46, 36, 2, 18), (46, 48, 3, 16), (7, 36, 2, 32)]
)
def test_the_scale_of_the_largest_gemma_is_its_own(
    layers: int, hidden_size: int, heads: int, scalar: int, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden_size, "num_attention_heads": heads}
    model = tiny_family(
        "gemma2", vocab_size=PIECES.size, num_key_value_heads=1, layer_types=None, intermediate_size=8, **sizes
    )
    folder = prepared(write_gguf(model, PIECES, tmp_path / "m.gguf"))
    assert json.loads((folder / "config.json").read_text())["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("name", "changes", "cause"),
    [
        ("gemma3", {"gemma3.attention.sliding_window": 0}, "sliding_window is 0, less than 1"),
        ("phi3", {"phi3.rope.scaling.type": "yarn"}, "by `yarn`, which is not supported"),
        ("qwen3", {"qwen3.rope.dimension_count": 8}, "rotates only a part of each head"),
    ],
)
def test_what_an_architecture_does_not_do_is_refused(
    name: str, changes: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    reference, vocabulary = made(name)
    with pytest.raises(ConfigurationError, match=rf"m\.gguf.*{cause}"):
        prepared(write_gguf(reference, vocabulary, tmp_path / "m.gguf", **changes))


def test_factors_of_one_kind_alone_are_refused(tmp_path: Path) -> None:
    reference, vocabulary = made("phi3 longrope")
    reference.config.rope_parameters["short_factor"] = [1.0]
    with pytest.raises(ConfigurationError, match="1 rotary factors for short contexts and 4 for long ones"):
        prepared(write_gguf(reference, vocabulary, tmp_path / "m.gguf"))
