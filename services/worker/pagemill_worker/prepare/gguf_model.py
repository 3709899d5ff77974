"""A GGUF file, prepared."""

from __future__ import annotations

from pagemill_shared.errors import ConfigurationError
from pagemill_shared.manifest import BLOCKS_NAME
from pagemill_worker.prepare.gguf_architecture import architecture_of, map_tensors, model_config
from pagemill_worker.prepare.gguf_blocks import block_kind, kept_blocks
from pagemill_worker.prepare.gguf_file import GgufFile
from pagemill_worker.prepare.gguf_metadata import Metadata
from pagemill_worker.prepare.gguf_tokenizer import read_tokenizer
from pagemill_worker.prepare.safetensors_stream import StreamedTensor, encode
from pagemill_worker.prepare.workspace import Workspace


def prepare_gguf(file: GgufFile, space: Workspace) -> None:
    """Writes configuration, tokenizer, templates and float32 weights, and the blocks of quantised matrices.

    Raises:
        ConfigurationError: the file is damaged, holds what is not supported, or there is no space for the weights.
    """
    architecture = architecture_of(file)
    config = model_config(file, architecture)
    mapped = map_tensors(file, architecture, config)
    tokenizer = read_tokenizer(file, config["max_position_embeddings"])
    tokens = len(file.metadata["tokenizer.ggml.tokens"])
    if tokens > config["vocab_size"]:
        raise ConfigurationError(f"{file.path} is damaged: {tokens} tokens, but {config['vocab_size']} embeddings")
    tensors = [StreamedTensor(entry.name, entry.source.shape, entry.rows()) for entry in mapped]
    kinds = {entry.name: kind for entry in mapped if (kind := block_kind(entry.source)) is not None}
    blocks = [kept_blocks(entry, kinds[entry.name]) for entry in mapped if entry.name in kinds]
    size = sum(tensor.nbytes for tensor in (*tensors, *blocks))

    space.reserve(size)
    space.write_json("config.json", config)
    space.write_json("generation_config.json", _generation_config(file))
    space.write_json("tokenizer.json", tokenizer.tokenizer)
    space.write_json("tokenizer_config.json", tokenizer.config)
    space.write_templates(tokenizer.templates)
    space.begin("converting the weights to float32", size)
    space.write("model.safetensors", encode(tensors))
    if blocks:
        space.write(BLOCKS_NAME, encode(blocks, kinds))


def _generation_config(file: GgufFile) -> dict[str, object]:
    """End of turn and end of message are end tokens where the file names them."""
    tokens = Metadata(file, "tokenizer.ggml")
    ends = [tokens.token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = {
        "bos_token_id": tokens.token_id("bos_token_id"),
        "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)),
        "pad_token_id": tokens.token_id("padding_token_id"),
    }
    return {name: value for name, value in ids.items() if value is not None}
