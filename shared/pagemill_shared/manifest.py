"""A prepared model: a folder of ordinary files beside one manifest that every process reads.

``pagemill prepare`` (the worker's code) writes it once; the gateway reads tokenizer, template and generation
defaults from it without torch, the worker reads the weights.

    pagemill.json            this manifest, written last: a folder without it is not prepared
    config.json              transformers' model configuration
    generation_config.json   transformers' generation defaults
    tokenizer.json, tokenizer_config.json
    chat_template.jinja      absent when the model has no template
    *.safetensors            weights
    model.gguf-blocks        where a GGUF file stores matrices in blocks of few bits: these blocks, which
                             `--quantization gguf` computes with, in the format of safetensors
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pagemill_shared.errors import ConfigurationError

MANIFEST_NAME = "pagemill.json"
BLOCKS_NAME = "model.gguf-blocks"
FORMAT = 1


class ModelManifest(BaseModel):
    """What the gateway and the worker must agree on. ``fingerprint`` is compared when a worker joins."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    name: str = Field(description="what /v1/models calls it unless --served-model-name says otherwise")
    source: str = Field(description="the MODEL argument that it was prepared from")
    source_state: str = Field(description="changes when the source's files change, so that a stale copy is noticed")
    fingerprint: str = Field(description="hex digest over configuration, tokenizer and weights", max_length=128)
    architecture: str = Field(description="transformers class name, LlamaForCausalLM for example")
    vocab_size: int = Field(gt=0)
    max_model_len: int = Field(gt=0, description="the model's own limit in tokens")
    bos_token_id: int | None = None
    eos_token_ids: list[int] = Field(description="union over generation config, config and tokenizer")


def prepared_folder(cache_dir: Path, model: str) -> Path:
    """Where the prepared form of ``model`` (a folder, hub name, .gguf file or ``bundled``) lives."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name or model).strip("-.") or "model"
    digest = hashlib.sha256(model.encode()).hexdigest()[:12]
    return cache_dir / "models" / f"{slug}-{digest}"


def write_manifest(folder: Path, manifest: ModelManifest) -> None:
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> ModelManifest:
    """The manifest of a prepared model.

    Raises:
        ConfigurationError: the folder holds none, or one of another format.
    """
    path = folder / MANIFEST_NAME
    try:
        return ModelManifest.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{folder} holds no prepared model (run `pagemill prepare MODEL` first)") from None
    except (OSError, ValidationError, ValueError) as error:
        raise ConfigurationError(f"{path} is not readable: {str(error).splitlines()[0]}") from None
