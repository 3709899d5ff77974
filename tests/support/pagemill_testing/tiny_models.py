"""Small random checkpoints in transformers' form, and runners over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pagemill_kernels.interface import Kernels, Quantization, ResidentKernels
from pagemill_kernels.reference import TorchKernels
from pagemill_kernels.select import select_kernels
from pagemill_shared.schema import Int32Array
from pagemill_worker.cache import KVCache
from pagemill_worker.forward import ResidentForward
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.graphs import Record
from pagemill_worker.models.registry import load_model
from pagemill_worker.moves import Lanes
from pagemill_worker.runner import Runner

CPU = torch.device("cpu")
VOCAB = 160


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A Llama of two layers whose logits are spread widely enough that greedy choices are no ties."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(fields | changes))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # transformers starts them at 0 and 1
            parameter.data += torch.randn_like(parameter) * 0.1
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def make_runner(
    folder: Path,
    *,
    num_blocks: int = 64,
    num_swap_blocks: int = 0,
    block_size: int = 4,
    max_model_len: int = 256,
    dtype: torch.dtype = torch.float32,
    clock: Callable[[], float] = lambda: 0.0,
    kernels: Kernels[Any] | None = None,
    quantization: Quantization = "none",
    cache_dtype: torch.dtype | None = None,
    is_resident: bool = False,
    record: Record | None = None,
    lanes: Lanes | None = None,
) -> Runner:
    """``is_resident``: computes as on a GPU, with plain torch; ``record`` then makes its recordings."""
    config = json.loads((folder / "config.json").read_text())
    kernels = kernels or (TorchKernels() if is_resident else select_kernels(CPU))
    model = load_model(folder, config, max_model_len, dtype, CPU, kernels, quantization)
    cache = KVCache(model.cache, block_size, num_blocks, num_swap_blocks, cache_dtype or dtype, CPU)
    grammars = InlineCompiler(folder, model.vocab_size, [config["eos_token_id"]])
    forward = None
    if is_resident:
        assert isinstance(kernels, ResidentKernels)
        forward = ResidentForward(model, cache, kernels, CPU, max_model_len, None if record is None else lambda: record)
    return Runner(model, cache, kernels, max_model_len, CPU, grammars, clock, forward=forward, lanes=lanes)


class InlineCompiler(GrammarCompiler):
    """Compiles while the caller waits, so that a plan may sample in the plan in which a sequence joins."""

    def start(self, grammar: str, outputs: Int32Array) -> Future[LLMatcher]:
        future = super().start(grammar, outputs)
        future.exception(60)
        return future


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers generates greedily, end tokens being ordinary ones."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return result[0, len(prompt) :].tolist()
