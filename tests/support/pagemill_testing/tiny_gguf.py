"""Tiny Llama models as GGUF files, together with the float32 weights that transformers should see."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

Kind = GGMLQuantizationType
Floats = npt.NDArray[np.float32]

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 2, 4, 2, 64
CONTEXT = 128

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Where a block of each format keeps its half-precision scales, which random bytes must not make infinite.
_SCALES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}

TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog. The dog didn't mind; it's used to foxes, and they're quick.",
    "In 1998 there were 1,234,567 foxes and 42 dogs (3.14 % of all).\n\n\tdef jump(over):\n        return over + 1",
    "Größere Füchse springen über faule Hunde; les renards bruns sautent par-dessus les chiens paresseux à l'été.",
    "日本語の狐は速い。中文狐狸跳过懒狗。 Быстрая лиса прыгает. 🙂👩‍🚀 foxes foxes foxes dogs dogs quick quick",
]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as GGUF's metadata has it."""

    metadata: dict[str, Any]

    @property
    def size(self) -> int:
        return len(self.metadata["tokenizer.ggml.tokens"])


def byte_level_vocabulary(pre: str = "smollm", merges: int = 300) -> Vocabulary:
    """Byte-level BPE, trained on `TRAINING_TEXT`; ids 0 to 2 are special, 3 is user-defined."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        TRAINING_TEXT * 3,
        trainers.BpeTrainer(
            vocab_size=256 + merges,
            special_tokens=[*special, "<tool>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    ids = tokenizer.get_vocab()
    return Vocabulary(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": sorted(ids, key=ids.__getitem__),
            "tokenizer.ggml.token_type": [CONTROL] * len(special) + [USER_DEFINED] + [NORMAL] * (len(ids) - 4),
            "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(tokenizer)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
        }
    )


def sentencepiece_vocabulary(merges: int = 300) -> Vocabulary:
    """SentencePiece BPE: unknown, BOS, EOS, a user-defined token, 256 bytes, and pieces whose scores fall in the order
    in which training found them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=merges, show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT * 3, trainer)
    ids = tokenizer.get_vocab()
    joined = ["".join(pair) for pair in _merges(tokenizer)]
    pieces = joined + sorted(ids.keys() - set(joined))
    head = ["<unk>", "<s>", "</s>", "<tool>"]
    return Vocabulary(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": head + [f"<0x{byte:02X}>" for byte in range(256)] + pieces,
            "tokenizer.ggml.scores": [0.0] * (len(head) + 256) + [-float(rank) for rank in range(len(pieces))],
            "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, USER_DEFINED]
            + [BYTE] * 256
            + [NORMAL] * len(pieces),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


@dataclass(slots=True)
class TinyGguf:
    """What goes into the file. Change any of it before `write`."""

    vocabulary: Vocabulary = field(default_factory=byte_level_vocabulary)
    kind: Kind = Kind.Q8_0
    """Of the matrices; vectors are float32."""
    tied: bool = True
    biases: tuple[str, ...] = ()
    """Projections that have one."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Added to the entries, or in their place; None leaves one out."""
    seed: int = 0
    weights: dict[str, Floats] = field(init=False, default_factory=dict)
    """By transformers' name: what the file holds, dequantised."""
    tensors: dict[str, tuple[npt.NDArray[Any], Kind]] = field(init=False, default_factory=dict)
    """By GGUF's name: stored bytes, and their format."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        vocab = self.vocabulary.size
        self._matrix("token_embd.weight", "model.embed_tokens.weight", (vocab, HIDDEN), rng)
        self._vector("output_norm.weight", "model.norm.weight", HIDDEN, rng)
        if not self.tied:
            self._matrix("output.weight", "lm_head.weight", (vocab, HIDDEN), rng)
        query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        projections = [
            ("attn_q", "self_attn.q_proj", (query, HIDDEN), HEADS),
            ("attn_k", "self_attn.k_proj", (key, HIDDEN), KV_HEADS),
            ("attn_v", "self_attn.v_proj", (key, HIDDEN), 0),
            ("attn_output", "self_attn.o_proj", (HIDDEN, query), 0),
            ("ffn_gate", "mlp.gate_proj", (INTERMEDIATE, HIDDEN), 0),
            ("ffn_up", "mlp.up_proj", (INTERMEDIATE, HIDDEN), 0),
            ("ffn_down", "mlp.down_proj", (HIDDEN, INTERMEDIATE), 0),
        ]
        for layer in range(LAYERS):
            block, module = f"blk.{layer}", f"model.layers.{layer}"
            self._vector(f"{block}.attn_norm.weight", f"{module}.input_layernorm.weight", HIDDEN, rng)
            self._vector(f"{block}.ffn_norm.weight", f"{module}.post_attention_layernorm.weight", HIDDEN, rng)
            for source, target, shape, permuted_heads in projections:
                self._matrix(f"{block}.{source}.weight", f"{module}.{target}.weight", shape, rng, permuted_heads)
                if source in self.biases:
                    self._vector(f"{block}.{source}.bias", f"{module}.{target}.bias", shape[0], rng, permuted_heads)

    def _matrix(
        self, source: str, target: str, shape: tuple[int, int], rng: np.random.Generator, permuted_heads: int = 0
    ) -> None:
        stored = _random_rows(shape, self.kind, rng)
        # Quantised blocks lie within a row, so that permuting rows and dequantising may change places.
        self.weights[target] = dequantize(stored, self.kind)
        self.tensors[source] = (_interleave(stored, permuted_heads), self.kind)

    def _vector(self, source: str, target: str, length: int, rng: np.random.Generator, permuted_heads: int = 0) -> None:
        values = rng.normal(1.0 if target.endswith("norm.weight") else 0.0, 0.1, length).astype(np.float32)
        self.weights[target] = values
        self.tensors[source] = (_interleave(values, permuted_heads), Kind.F32)

    def entries(self) -> dict[str, Any]:
        base = {
            "general.architecture": "llama",
            "general.name": "Tiny",
            "llama.context_length": CONTEXT,
            "llama.embedding_length": HIDDEN,
            "llama.block_count": LAYERS,
            "llama.feed_forward_length": INTERMEDIATE,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": HEAD_DIM,
            "llama.rope.freq_base": 10000.0,
            "llama.vocab_size": self.vocabulary.size,
            **self.vocabulary.metadata,
        }
        return {key: value for key, value in {**base, **self.metadata}.items() if value is not None}

    def write(self, path: Path) -> Path:
        entries = self.entries()
        writer = GGUFWriter(path, entries.pop("general.architecture"))
        add_entries(writer, entries)
        for name, (data, kind) in self.tensors.items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def add_entries(writer: GGUFWriter, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _random_rows(shape: tuple[int, int], kind: Kind, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Rows as the file stores them: quantised values, or, for formats that only llama.cpp can make, random blocks."""
    if kind not in _SCALES:
        return quantize(rng.normal(0, 0.05, shape).astype(np.float32), kind)
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // block_elements, block_bytes), dtype=np.uint8)
    for offset in _SCALES[kind]:
        scales = rng.uniform(1e-4, 3e-4, blocks.shape[:2]).astype("<f2")
        blocks[:, :, offset : offset + 2] = scales[:, :, None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _interleave(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """The order of rows in which llama.cpp's converter stores queries and keys."""
    if not heads:
        return rows
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
