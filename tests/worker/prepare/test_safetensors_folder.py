from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagemill_testing.tiny_folder import TEMPLATE, write_folder, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.safetensors_folder import prepare_folder, source_files
from pagemill_worker.prepare.workspace import Workspace


def prepare(source: Path) -> Path:
    made = source.with_name("made")
    made.mkdir()
    prepare_folder(source, str(source), Workspace(made, lambda what, share: None))
    return made


def change(path: Path, **entries: Any) -> None:
    write_json(path, {**json.loads(path.read_text()), **entries})


@pytest.mark.parametrize("shards", [1, 3])
def test_model_and_tokenizer_are_those_of_the_source(tmp_path: Path, shards: int) -> None:
    source = write_folder(tmp_path / "source", shards=shards)
    made = prepare(source)
    tokens = torch.arange(50)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (source, made)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
    theirs, ours = (AutoTokenizer.from_pretrained(folder) for folder in (source, made))
    text = "Größe 123 <|im_end|>🙂"
    assert ours(text).input_ids == theirs(text).input_ids
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)
    weights = list(made.glob("*.safetensors"))
    assert len(weights) == shards
    assert all(path.is_symlink() for path in weights)
    assert not any(path.is_symlink() for path in made.iterdir() if path not in weights)


def test_configuration_is_kept_to_the_byte(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    write_json(source / "generation_config.json", {"eos_token_id": [1, 2], "temperature": 0.6})
    made = prepare(source)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (made / name).read_bytes() == (source / name).read_bytes()


def test_generation_defaults_come_from_the_configuration_where_there_are_none(tmp_path: Path) -> None:
    made = prepare(write_folder(tmp_path / "source", eos_token_id=[1, 2]))
    assert json.loads((made / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": [1, 2]}


class TestTemplates:
    def test_a_file(self, tmp_path: Path) -> None:
        source = write_folder(tmp_path / "source")
        (source / "chat_template.jinja").write_bytes(b"{{ 1 }}\r\n\xc3\xa9\n")
        assert (prepare(source) / "chat_template.jinja").read_bytes() == b"{{ 1 }}\r\n\xc3\xa9\n"

    def test_an_entry_of_the_tokenizer(self, tmp_path: Path) -> None:
        source = write_folder(tmp_path / "source")
        (source / "chat_template.jinja").unlink()
        change(source / "tokenizer_config.json", chat_template="{{ 'entry' }}")
        made = prepare(source)
        assert (made / "chat_template.jinja").read_text() == "{{ 'entry' }}"
        assert "chat_template" not in json.loads((made / "tokenizer_config.json").read_text())

    def test_the_file_wins_over_the_entry(self, tmp_path: Path) -> None:
        source = write_folder(tmp_path / "source")
        change(source / "tokenizer_config.json", chat_template="{{ 'entry' }}")
        assert (prepare(source) / "chat_template.jinja").read_text() == TEMPLATE

    def test_a_processors_file(self, tmp_path: Path) -> None:
        source = write_folder(tmp_path / "source")
        (source / "chat_template.jinja").unlink()
        write_json(source / "chat_template.json", {"chat_template": "{{ 'processor' }}"})
        assert (prepare(source) / "chat_template.jinja").read_text() == "{{ 'processor' }}"

    def test_several(self, tmp_path: Path) -> None:
        source = write_folder(tmp_path / "source")
        (source / "chat_template.jinja").unlink()
        named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
        change(source / "tokenizer_config.json", chat_template=named)
        made = prepare(source)
        assert AutoTokenizer.from_pretrained(made).chat_template == {"default": "D", "tool_use": "T"}

    def test_none(self, tmp_path: Path) -> None:
        source = write_folder(tmp_path / "source")
        (source / "chat_template.jinja").unlink()
        made = prepare(source)
        assert not (made / "chat_template.jinja").exists()
        assert AutoTokenizer.from_pretrained(made).chat_template is None

    @pytest.mark.parametrize("template", [[{"name": "x"}], [1], 5, [{"name": "x", "template": None}]])
    def test_damaged(self, tmp_path: Path, template: Any) -> None:
        source = write_folder(tmp_path / "source")
        change(source / "tokenizer_config.json", chat_template=template)
        with pytest.raises(ConfigurationError, match="chat templates are damaged"):
            prepare(source)


def test_an_old_tokenizer_is_converted(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    write_json(source / "vocab.json", tokenizer["model"]["vocab"] | {"ab": 259})
    (source / "merges.txt").write_text("#version: 0.2\na b\n")
    (source / "tokenizer.json").unlink()
    (source / "special_tokens_map.json").unlink(missing_ok=True)
    names = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "</s>"}
    write_json(source / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **names})
    converted = AutoTokenizer.from_pretrained(prepare(source))
    assert converted("abba").input_ids == AutoTokenizer.from_pretrained(source)("abba").input_ids
    assert len(converted("ab").input_ids) == 1
    assert converted.decode(converted("abba é").input_ids) == "abba é"


def test_code_of_the_model_is_never_referred_to(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", auto_map={"AutoConfig": "evil.Config"})
    change(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Slow", None]})
    (source / "evil.py").write_text("raise SystemExit('it ran')")
    made = prepare(source)
    assert "auto_map" not in (made / "config.json").read_text() + (made / "tokenizer_config.json").read_text()
    assert AutoTokenizer.from_pretrained(made)("a").input_ids
    assert AutoModelForCausalLM.from_pretrained(made).config.model_type == "llama"


@pytest.mark.parametrize(
    ("removed", "added", "cause"),
    [
        (["config.json"], {}, "holds no config.json$"),
        (["config.json"], {"m.gguf": "x"}, "holds no config.json; name its .gguf file instead"),
        (["model.safetensors"], {}, r"holds no model.safetensors and no model.safetensors.index.json$"),
        (["model.safetensors"], {"pytorch_model.bin": "x"}, "are pickles, which are never loaded: save them as safe"),
        (["tokenizer.json"], {}, "holds no tokenizer"),
        (["tokenizer.json"], {"tokenizer.model": "nonsense"}, "tokenizer cannot be converted: "),
        ([], {"config.json": "{"}, "config.json cannot be read: "),
        ([], {"config.json": "[]"}, "config.json is not a JSON object"),
        ([], {"config.json": '{"model_type": "new", "auto_map": {}}'}, "needs code of its own, which is never run"),
        ([], {"model.safetensors": "nonsense, but long enough"}, "model.safetensors is truncated or is not a safetens"),
        ([], {"model.safetensors.index.json": "{}"}, "is damaged: it has no weight_map"),
        ([], {"model.safetensors.index.json": '{"weight_map": {"w": "gone.st"}}'}, r"lacks the file 'gone\.st'"),
        ([], {"model.safetensors.index.json": '{"weight_map": {"w": "../m"}}'}, r"lacks the file '\.\./m'"),
        (
            [],
            {"model.safetensors.index.json": '{"weight_map": {"w": "model.safetensors"}}'},
            "model.safetensors lacks the tensor 'w'",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_cause(
    tmp_path: Path, removed: list[str], added: dict[str, str], cause: str
) -> None:
    source = write_folder(tmp_path / "source")
    for name in removed:
        (source / name).unlink()
    for name, content in added.items():
        (source / name).write_text(content)
    with pytest.raises(ConfigurationError, match=cause) as caught:
        prepare(source)
    assert "\n" not in str(caught.value)


def test_the_source_consists_of_all_that_is_read(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", shards=2)
    (source / "README.md").write_text("not read")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    assert [path.relative_to(source).as_posix() for path in source_files(source)] == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
