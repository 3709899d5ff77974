"""Defaults of sampling parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagemill_gateway.completion_body import CompletionBody
from pagemill_gateway.defaults import GenerationDefaults, SamplingResolver
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.manifest import ModelManifest

MANIFEST = ModelManifest(
    name="m",
    source="m",
    source_state="1",
    fingerprint="f",
    architecture="A",
    vocab_size=100,
    max_model_len=50,
    eos_token_ids=[7, 2, 7],
)


def encode_word(word: str) -> list[list[int]]:
    return [[ord(c) % 100 for c in word]]


def resolver(**defaults: Any) -> SamplingResolver:
    return SamplingResolver(MANIFEST, GenerationDefaults(**defaults), encode_word, lambda: 99)


def test_without_suggestions_everything_is_off() -> None:
    sampling = resolver().resolve(CompletionBody(prompt="x"), 5, None, "")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (1.0, 99, 5)
    assert sampling.eos_token_ids.tolist() == [2, 7]


def test_the_models_suggestions_hold_until_the_request_says_otherwise(tmp_path: Path) -> None:
    config = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "do_sample": False,
        "min_p": None,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    defaults = GenerationDefaults.load(tmp_path)
    assert defaults == GenerationDefaults(0.6, 0.9, 20, 0.0, 1.05)
    resolve = SamplingResolver(MANIFEST, defaults, encode_word, lambda: 1).resolve
    assert resolve(CompletionBody(prompt="x"), 5, None, "").temperature == 0.6
    said = resolve(CompletionBody(prompt="x", temperature=0.0, top_k=-1, top_p=1.0), 5, None, "")
    assert (said.temperature, said.top_k, said.top_p) == (0.0, 0, 1.0)


def test_a_model_without_the_file(tmp_path: Path) -> None:
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"temperature": "hot"}', '{"top_p": 7}', '{"top_k": 1.5}', '{"min_p": true}', '{"top_p": NaN}']
)
def test_suggestions_that_make_no_sense(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigurationError, match="generation_config"):
        GenerationDefaults.load(tmp_path)
