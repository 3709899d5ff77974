"""A tiny Llama model as transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<s>", "</s>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}<|im_end|>\n{% endfor %}"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "vocab_size": 264,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


def write_folder(folder: Path, *, shards: int = 1, **config: Any) -> Path:
    """A folder with all the usual files. ``config`` is added to `CONFIG`, where None leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    write_json(folder / "config.json", merged)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = Tokenizer(models.BPE({**{t: i for i, t in enumerate(SPECIAL)}, **_bytes(len(SPECIAL))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_weights(folder, shards=shards)
    return folder


def write_weights(folder: Path, *, shards: int = 1, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (264, 16),
        f"{layer}.input_layernorm.weight": (16,),
        f"{layer}.self_attn.q_proj.weight": (16, 16),
        f"{layer}.self_attn.k_proj.weight": (8, 16),
        f"{layer}.self_attn.v_proj.weight": (8, 16),
        f"{layer}.self_attn.o_proj.weight": (16, 16),
        f"{layer}.post_attention_layernorm.weight": (16,),
        f"{layer}.mlp.gate_proj.weight": (32, 16),
        f"{layer}.mlp.up_proj.weight": (32, 16),
        f"{layer}.mlp.down_proj.weight": (16, 32),
        "model.norm.weight": (16,),
    }
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    names = sorted(weights)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    index = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        save_file({n: weights[n] for n in names if index[n] == file}, folder / file, {"format": "pt"})
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _bytes(first: int) -> dict[str, int]:
    return {char: first + i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
