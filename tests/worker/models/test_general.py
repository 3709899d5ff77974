"""Models that transformers runs, all but their attention: equality with transformers alone, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pagemill_testing.cpu_kernels import isa_names, loaded
from pagemill_testing.equality import check_equality
from pagemill_testing.plan_driver import PlanDriver
from pagemill_testing.tiny_families import SIZES, WINDOW, randomised
from pagemill_testing.tiny_models import VOCAB, make_runner, save
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_shared.errors import ConfigurationError
from pagemill_worker.models import general

GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
OPT = {"vocab_size": VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
OPT |= {"max_position_embeddings": 256, "word_embed_proj_dim": 64, "init_std": 0.2}
IMAGES = {
    "eos_token_id": 2,
    "mm_tokens_per_image": 4,
    "image_token_index": 160,
    "boi_token_index": 161,
    "eoi_token_index": 162,
    "text_config": {**SIZES, "vocab_size": 163, "head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    },
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "opt, norms behind": (
        "OPTForCausalLM",
        "OPTConfig",
        {**OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2, scaled by layer": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "mixture of experts": ("MixtralForCausalLM", "MixtralConfig", {**SIZES, "num_local_experts": 4}),
    "windows": ("Starcoder2ForCausalLM", "Starcoder2Config", {**SIZES, "sliding_window": WINDOW}),
    "text and images": ("Gemma3ForConditionalGeneration", "Gemma3Config", IMAGES),
    "scaled logits": ("CohereForCausalLM", "CohereConfig", {**SIZES, "logit_scale": 0.25}),
}


def tiny(architecture: str, config: str, fields: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    made = getattr(transformers, config)(**fields)
    made._attn_implementation = "eager"
    return randomised(getattr(transformers, architecture)(made).eval())


@pytest.fixture(scope="module")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    return CpuKernels(loaded(isa_names()[0], tmp_path_factory), "test")


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_equal_transformers(
    name: str, compiled_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tiny(*MODELS[name])
    save(reference, tmp_path)
    for kernels in (None, compiled_kernels):
        check_equality(reference, make_runner(tmp_path, kernels=kernels), monkeypatch)
    assert not {kernel for kernel in compiled_kernels.calls if kernel.endswith(":torch")}


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_int8_products_serve_them_as_well(name: str, compiled_kernels: CpuKernels, tmp_path: Path) -> None:
    folder = save(tiny(*MODELS[name]), tmp_path)
    runner = make_runner(folder, kernels=compiled_kernels, quantization="int8")
    assert runner.model.linear_name == "int8"
    exact = make_runner(folder, kernels=compiled_kernels)
    logits = []
    for each in (exact, runner):
        driver = PlanDriver(each)
        driver.add(list(range(3, 30)), 1)
        compute = each.model.logits
        each.model.logits = lambda hidden, compute=compute: logits.append(compute(hidden)) or logits[-1]  # type: ignore
        driver.run()
    error = (logits[1] - logits[0]).square().mean().sqrt() / logits[0].square().mean().sqrt()
    assert 0 < error < 0.15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_pass_the_trial(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_runner(save(tiny(*MODELS["opt"]), tmp_path), dtype=dtype).model
    assert model.logits(torch.randn(2, 64).to(dtype)).dtype == torch.float32


HYBRID = {**SIZES, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 32}
MLA = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "state space": ("MambaForCausalLM", "MambaConfig", {"hidden_size": 32, "num_hidden_layers": 1}, "keeps a state"),
    "linear positions": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 1, "n_head": 2},
        "does not attend through transformers' attention interface",
    ),
    "latent attention": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**SIZES, **MLA, "num_key_value_heads": 4, "first_k_dense_replace": 9, "topk_method": "greedy"},
        "keys of 24 and values of 16 elements",
    ),
    "sinks": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**SIZES, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
        "has attention sinks",
    ),
    "scaling by the batch": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**SIZES, "head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "by the longest sequence of a batch",
    ),
    "chunks": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**SIZES, "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96},
        "has layers of type 'chunked_attention'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_more_than_attention_is_refused(name: str, tmp_path: Path) -> None:
    architecture, config, fields, message = REFUSED[name]
    save(tiny(architecture, config, {"vocab_size": VOCAB, **fields}), tmp_path)
    with pytest.raises(
        ConfigurationError, match=f"{architecture} is not supported: it .*{message}.*; supported are Ll"
    ):
        make_runner(tmp_path)


def test_an_encoder_and_a_decoder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True})
    )
    with pytest.raises(ConfigurationError, match="T5ForConditionalGeneration is not supported: it is not among"):
        make_runner(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"),
            "lack the tensor transformer.h.1.mlp.c_fc.weight",
        ),
        (lambda tensors: tensors.update({"transformer.h.3.x": torch.ones(1)}), "hold .*h.3.x, which this architecture"),
        (
            lambda tensors: tensors.update({"transformer.wpe.weight": torch.ones(9, 64)}),
            "hold .*wpe.weight.* in another shape",
        ),
    ],
)
def test_weights_that_do_not_belong_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    save(tiny(*MODELS["gpt2"]), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=message):
        make_runner(tmp_path)


def test_masks_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    save(tiny(*MODELS["gpt2"]), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 9, 9, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert make_runner(tmp_path).model.cache.num_layers == 3


def test_the_trial_notices_what_attention_does_not_carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that mixes each token with the one before it, beside attention."""
    folder = save(tiny(*MODELS["opt"]), tmp_path)
    block = transformers.models.opt.modeling_opt.OPTDecoderLayer
    compute = block.forward

    def mixed(self: Any, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        before = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return compute(self, hidden_states + 0.3 * before, **others)

    monkeypatch.setattr(block, "forward", mixed)
    with pytest.raises(
        ConfigurationError, match="ties tokens together by more than attention: by blocks its logits are"
    ):
        make_runner(folder)


def test_the_trial_fits_a_short_context(tmp_path: Path) -> None:
    folder = save(tiny("GPT2LMHeadModel", "GPT2Config", {**GPT2, "n_positions": 20}), tmp_path)
    assert make_runner(folder, max_model_len=20).model.cache.num_layers == 3
    assert sum(general.TRIAL_CHUNKS) > 20
