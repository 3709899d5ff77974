"""Models by their shape: what they take, and random weights for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes, named as in config.json where a comment does not say otherwise."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # num_hidden_layers
    num_heads: int  # num_attention_heads
    num_kv_heads: int  # num_key_value_heads
    head_dim: int
    tied: bool  # tie_word_embeddings
    max_model_len: int = 131_072  # max_position_embeddings

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the names that transformers gives."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
                f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
                f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
                f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
                f"{prefix}.mlp.up_proj.weight": (inner, hidden),
                f"{prefix}.mlp.down_proj.weight": (hidden, inner),
            }
        return shapes

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all, but of an embedding that is no head a few rows only."""
        unread = 0 if self.tied else self.vocab_size * self.hidden_size
        return (self.num_parameters - unread) * DTYPE.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE.itemsize

    def step_bytes(self, batch: int, context: int) -> int:
        """Fewest bytes that a decode step reads: the weights once, the keys and values of all rows once."""
        return self.step_weight_bytes + batch * context * self.token_bytes

    @property
    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_model_len,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "bfloat16",
        }


LLAMA_8B = Shape("Llama-3.1-8B", 128_256, 4096, 14_336, 32, 32, 8, 128, tied=False)
LLAMA_1B = Shape("Llama-3.2-1B", 128_256, 2048, 8192, 16, 32, 8, 64, tied=True)


class RandomWeights:
    """Weights of a shape out of thin air, as `pagemill_worker.models.weights.Weights` reads them from files."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shapes = shape.tensors
        self._generator = torch.Generator(device).manual_seed(0)
        self._device = device

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        wanted = tuple(shape)
        if self._shapes[name] != wanted:
            raise ValueError(f"{name} is asked for as {wanted}, and is {self._shapes[name]}")
        if len(wanted) == 1:
            return torch.ones(wanted, dtype=DTYPE, device=self._device)
        made = torch.empty(wanted, dtype=DTYPE, device=self._device)
        return made.normal_(0, wanted[1] ** -0.5, generator=self._generator)

    def fuse(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        return torch.cat([self.take(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def blocks(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Nothing is quantised here."""

    def refuse_unread(self, harmless: Sequence[str]) -> None:
        """Nothing is left unread here."""

    def all(self) -> Iterator[tuple[str, Tensor]]:
        for name, shape in self._shapes.items():
            yield name, self.take(name, shape)


def write_folder(shape: Shape, folder: Path, device: torch.device) -> Path:
    """A model folder with random weights and a tokenizer of as many made-up words as the model has token ids."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.cpu() for name, tensor in RandomWeights(shape, device).all()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config), encoding="utf-8")
    special = ["<s>", "</s>", "<unk>"]
    words = special + [f"w{number}" for number in range(shape.vocab_size - len(special))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    return folder
