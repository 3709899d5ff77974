"""A folder as transformers saves it, prepared: its weights linked, the rest copied."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.json_file import read_json
from pagemill_worker.prepare.safetensors_stream import read_shapes
from pagemill_worker.prepare.workspace import Workspace

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SIDE_FILES = ("special_tokens_map.json", "added_tokens.json")  # of a tokenizer, older than tokenizer_config.json
_LEGACY_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.tiktoken")
_TEMPLATE_FILE, _TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    _TEMPLATE_FILE,
    "chat_template.json",
    "merges.txt",
    *_SIDE_FILES,
    *_LEGACY_TOKENIZERS,
)


def source_files(folder: Path) -> list[Path]:
    """All files that the prepared form depends on."""
    files = [path for name in _SMALL_FILES if (path := folder / name).is_file()]
    return files + sorted(folder.glob(f"{_TEMPLATE_FOLDER}/*.jinja")) + sorted(folder.glob("*.safetensors*"))


def prepare_folder(folder: Path, name: str, space: Workspace) -> None:
    """Copies configuration, tokenizer and templates; links the weights.

    Args:
        name: what errors call the model.

    Raises:
        ConfigurationError: the model is incomplete, damaged, or holds what is not supported.
    """
    config = read_json(folder / "config.json")
    if not config:
        raise ConfigurationError(f"{name} holds no config.json{_hint(folder)}")
    _refuse_foreign_code(config, name)
    weights = _weights(folder, name)

    if "auto_map" in config:
        space.write_json("config.json", _without(config, "auto_map"))
    else:
        space.copy("config.json", folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        space.copy(generation.name, generation)
    else:
        ids = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
        }
        space.write_json(generation.name, ids)
    _prepare_tokenizer(folder, name, space)

    space.begin("reading the weights", sum(path.stat().st_size for path in weights))
    if (folder / _INDEX).is_file():
        space.copy(_INDEX, folder / _INDEX)
    for path in weights:
        space.link(path.name, path)


def _weights(folder: Path, name: str) -> list[Path]:
    """The weight files, each checked to be whole."""
    index = folder / _INDEX
    if index.is_file():
        shard_of = read_json(index).get("weight_map")
        if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
            raise ConfigurationError(f"{index} is damaged: it has no weight_map")
        shapes = {}
        for shard in sorted(set(shard_of.values())):
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise ConfigurationError(f"{name} lacks the file {shard!r}, which {_INDEX} names")
            shapes[shard] = read_shapes(folder / shard)
        missing = next((tensor for tensor, shard in shard_of.items() if tensor not in shapes[shard]), None)
        if missing is not None:
            raise ConfigurationError(f"{name}: {shard_of[missing]} lacks the tensor {missing!r}")
        return [folder / shard for shard in shapes]
    if (folder / _WEIGHTS).is_file():
        read_shapes(folder / _WEIGHTS)
        return [folder / _WEIGHTS]
    raise ConfigurationError(f"{name} holds no {_WEIGHTS} and no {_INDEX}{_hint(folder)}")


def _hint(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return "; name its .gguf file instead of the folder"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return " (weights in .bin or .pt files are pickles, which are never loaded: save them as safetensors)"
    return ""


def _refuse_foreign_code(config: dict[str, Any], name: str) -> None:
    if "auto_map" in config:
        from transformers import CONFIG_MAPPING  # it takes a second or more, and hardly any model needs this

        if config.get("model_type") not in CONFIG_MAPPING:
            raise ConfigurationError(f"{name} needs code of its own, which is never run")


def _prepare_tokenizer(folder: Path, name: str, space: Workspace) -> None:
    if (folder / "tokenizer.json").is_file():
        _copy_tokenizer(folder, space)
        return
    if not any((folder / legacy).is_file() for legacy in _LEGACY_TOKENIZERS):
        raise ConfigurationError(f"{name} holds no tokenizer (tokenizer.json)")
    from transformers import AutoTokenizer  # it takes a second or more, and few models need this

    space.report("converting the tokenizer", None)
    with tempfile.TemporaryDirectory() as converted:
        try:
            AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).save_pretrained(
                converted
            )
        except Exception as error:  # it raises whatever the damaged file or the missing package made it raise
            raise ConfigurationError(f"{name}: its tokenizer cannot be converted: {_first_line(error)}") from error
        if not (Path(converted) / "tokenizer.json").is_file():
            raise ConfigurationError(f"{name}: its tokenizer has no form that needs no code of its own")
        _copy_tokenizer(Path(converted), space)


def _copy_tokenizer(folder: Path, space: Workspace) -> None:
    space.copy("tokenizer.json", folder / "tokenizer.json")
    for side in _SIDE_FILES:
        if (folder / side).is_file():
            space.copy(side, folder / side)
    config = read_json(folder / "tokenizer_config.json")
    space.write_json("tokenizer_config.json", _without(config, "auto_map", "chat_template"))
    space.write_templates(_templates(folder, config))


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name, from each of the places where they have been kept; the newest place counts."""
    templates: dict[str, str] = {}
    try:
        for kept in (config.get("chat_template"), read_json(folder / "chat_template.json").get("chat_template")):
            if isinstance(kept, str):
                templates["default"] = kept
            elif kept is not None:
                templates.update({entry["name"]: entry["template"] for entry in kept})
        files = {path.stem: path for path in folder.glob(f"{_TEMPLATE_FOLDER}/*.jinja")}
        if (folder / _TEMPLATE_FILE).is_file():
            files["default"] = folder / _TEMPLATE_FILE
        templates.update({name: path.read_bytes().decode() for name, path in files.items()})
        if not all(isinstance(part, str) for entry in templates.items() for part in entry):
            raise TypeError
        return templates
    except (LookupError, TypeError, UnicodeDecodeError):
        raise ConfigurationError(f"{folder}: its chat templates are damaged") from None


def _without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in keys}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
