from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pagemill_testing.tiny_folder import write_folder, write_json
from safetensors.numpy import save_file

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.facts import ModelFacts, read_facts


def facts(
    folder: Path,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> ModelFacts:
    write_folder(folder, **{"bos_token_id": None, "eos_token_id": None, **(config or {})})
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer_config.json", tokenizer or {})
    return read_facts(folder)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ends"),
    [
        ({}, {"eos_token_id": [0, 2]}, {}, [0, 2]),
        ({}, {"eos_token_id": 2}, {}, [2]),
        ({"eos_token_id": 1}, None, {}, [1]),
        ({"eos_token_id": [2, 1, 2]}, None, {}, [1, 2]),
        ({}, None, {"eos_token": "</s>"}, [1]),
        ({}, None, {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}, [2]),
        ({"eos_token_id": 1}, {"eos_token_id": [7]}, {"eos_token": "<|im_end|>"}, [1, 2, 7]),
        ({"eos_token_id": 1, "text_config": {"eos_token_id": [4, 5]}}, None, {}, [1, 4, 5]),
        ({}, {}, {}, []),
        ({}, {"eos_token_id": [-1, 2, 264]}, {"eos_token": "not a token"}, [2]),
    ],
)
def test_end_tokens_are_the_union_of_the_three_sources(
    tmp_path: Path, config: Any, generation: Any, tokenizer: Any, ends: list[int]
) -> None:
    assert facts(tmp_path, config, generation, tokenizer).eos_token_ids == ends


def test_an_older_file_names_the_special_tokens_too(tmp_path: Path) -> None:
    write_folder(tmp_path, eos_token_id=None)
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": None})
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}})
    found = read_facts(tmp_path)
    assert (found.eos_token_ids, found.bos_token_id) == ([2], 0)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "beginning"),
    [
        ({"bos_token_id": 5}, {"bos_token_id": 6}, {"bos_token": "</s>"}, 1),
        ({"bos_token_id": 5}, {"bos_token_id": 6}, {}, 6),
        ({"bos_token_id": 5}, None, {}, 5),
        ({}, None, {}, None),
        ({"bos_token_id": -1}, None, {}, None),
    ],
)
def test_the_tokenizers_own_beginning_counts_first(
    tmp_path: Path, config: Any, generation: Any, tokenizer: Any, beginning: int | None
) -> None:
    assert facts(tmp_path, config, generation, tokenizer).bos_token_id == beginning


@pytest.mark.parametrize("value", ["2", True, [1, "2"], 1.0, {"id": 2}])
def test_an_end_token_of_another_type_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"generation_config\.json: eos_token_id is .*, neither a token id"):
        facts(tmp_path, generation={"eos_token_id": value})


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 64),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 32}}, 32),
    ],
)
def test_the_context_length_comes_from_the_configuration(tmp_path: Path, config: Any, length: int) -> None:
    assert facts(tmp_path, config).max_model_len == length


def test_the_vocabulary_is_as_large_as_the_embedding(tmp_path: Path) -> None:
    assert facts(tmp_path, {"vocab_size": 99}).vocab_size == 264


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"max_position_embeddings": None}, "names no context length"),
        ({"max_position_embeddings": 0}, "names no context length"),
        ({"max_position_embeddings": "many"}, "names no context length"),
    ],
)
def test_a_missing_fact_is_named(tmp_path: Path, config: Any, cause: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"config\.json {cause}"):
        facts(tmp_path, config)


def test_weights_without_an_embedding_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    save_file({"model.norm.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match="holds no token embedding"):
        read_facts(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": 5}', "{", '{"version": "1.0", "added_tokens": [{}]}'])
def test_a_damaged_tokenizer_is_found_now(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be used") as caught:
        read_facts(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigurationError, match=r"generation_config\.json is not a JSON object"):
        read_facts(tmp_path)
