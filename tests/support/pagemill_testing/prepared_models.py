"""Small prepared models for the gateway: real tokenizers made on the spot, in the files that the gateway reads."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pagemill_shared.manifest import ModelManifest, prepared_folder, write_manifest

FINGERPRINT = "f00d"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris, and the answer is 42.",
    "A stop string must never show before it is complete; a stream of text flows on and on, word by word.",
    "日本語日本語日本語 Zürich façade naïve 🙂🙂🙂 👩‍🚀👩‍🚀",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_bpe(vocab_size: int = 700) -> Tokenizer:
    """Byte-level BPE with three control tokens, ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return tokenizer


def byte_level_ids(text: str) -> list[int]:
    """The tokens of ``text`` in the tokenizer that `write_prepared_model` writes by default."""
    ids: list[int] = _byte_level_bpe().encode(text, add_special_tokens=False).ids
    return ids


@cache
def _byte_level_bpe() -> Tokenizer:
    return byte_level_bpe()


def sentencepiece_bpe() -> Tokenizer:
    """Pieces with U+2581 for blanks and byte fallback, as Llama 2 has them; BOS is ``<s>``, id 1."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(_CORPUS[:2]).replace(" ", "\u2581")))
    words = ["\u2581t", "\u2581th", "\u2581the", "\u2581f", "\u2581fo", "\u2581fox", "he"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, *letters, *words]))}
    merges = [
        ("\u2581", "t"),
        ("\u2581t", "h"),
        ("\u2581th", "e"),
        ("\u2581", "f"),
        ("\u2581f", "o"),
        ("\u2581fo", "x"),
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return tokenizer


def word_pieces() -> Tokenizer:
    """A tokenizer that does not decode token by token: ``##`` goes on with the word before."""
    words = ["[UNK]", "the", "quick", "fox", "jump", "##s", "##ed", "over", ",", "."]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer


def add_bos(tokenizer: Tokenizer, bos: str) -> None:
    """Makes the tokenizer put ``bos`` before each text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def write_prepared_model(
    cache_dir: Path,
    model: str = "bundled",
    *,
    tokenizer: Tokenizer | None = None,
    template: str | None = TEMPLATE,
    bos_token: str | None = "<|im_start|>",
    eos_token_ids: list[int] | None = None,
    generation_config: dict[str, Any] | None = None,
    max_model_len: int = 2048,
) -> Path:
    """The prepared folder of ``model`` under ``cache_dir``, without weights; ``tokenizer`` is the byte-level BPE."""
    folder = prepared_folder(cache_dir, model)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or byte_level_bpe()
    tokenizer.save(str(folder / "tokenizer.json"))
    specials = {"bos_token": bos_token} if bos_token else {}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | specials)
    )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    write_manifest(
        folder,
        ModelManifest(
            name="tiny",
            source=model,
            source_state="1",
            fingerprint=FINGERPRINT,
            architecture="LlamaForCausalLM",
            vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
            max_model_len=max_model_len,
            eos_token_ids=[2] if eos_token_ids is None else eos_token_ids,
        ),
    )
    return folder
