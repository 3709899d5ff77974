"""Tiny random checkpoints against transformers: whole prompts, chunks, decode and mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagemill_testing.cpu_kernels import isa_names, loaded
from pagemill_testing.equality import LogitsLog, check_equality, prompt
from pagemill_testing.plan_driver import PlanDriver
from pagemill_testing.tiny_families import FAMILIES, tiny_family
from pagemill_testing.tiny_models import make_runner, save, tiny_llama
from safetensors.torch import load_file, save_file

from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_shared.errors import ConfigurationError

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
    "long_factor": [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0],
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no grouping": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own head size": {"head_dim": 32},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "rope dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "rope llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "rope yarn": {"rope_parameters": {**YARN, "factor": 4.0}},
    "rope yarn, all of it": {
        "rope_parameters": {
            **YARN,
            "factor": 8.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "truncate": False,
        }
    },
    "rope yarn without a factor": {"rope_parameters": {**YARN, "factor": None, "attention_factor": 1.3}},
    "rope longrope": {"rope_parameters": LONGROPE},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


@pytest.fixture(scope="module")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    return CpuKernels(loaded(isa_names()[0], tmp_path_factory), "test")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_transformers(
    name: str, compiled_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tiny_family(name)
    save(reference, tmp_path)
    for kernels in (None, compiled_kernels):
        check_equality(reference, make_runner(tmp_path, kernels=kernels), monkeypatch)
    fallbacks = {kernel for kernel in compiled_kernels.calls if kernel.endswith(":torch")}
    assert not fallbacks


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = tiny_llama(**VARIANTS[name])
    check_equality(reference, make_runner(save(reference, tmp_path)), monkeypatch)


@pytest.mark.parametrize("name", FAMILIES)
def test_int8_products_serve_every_family(name: str, compiled_kernels: CpuKernels, tmp_path: Path) -> None:
    reference = tiny_family(name)
    runner = make_runner(save(reference, tmp_path), kernels=compiled_kernels, quantization="int8")
    assert runner.model.linear_name == "int8"
    driver = PlanDriver(runner, chunk=7)
    [sequence] = driver.add(prompt(37), 6)
    driver.run()
    with torch.inference_mode():
        logits = reference(torch.tensor([sequence.tokens])).logits[0, len(sequence.prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(sequence.outputs).unsqueeze(1)).squeeze(1)
    # Rounded to 8 bits a tiny random model still chooses one of the best tokens.
    assert float((logits.max(-1).values - chosen).max()) < 0.5 * float(logits.std())


def test_long_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = tiny_llama(**VARIANTS["rope llama3"])
    runner = make_runner(save(reference, tmp_path))
    driver = PlanDriver(runner, chunk=50)
    [sequence] = driver.add(prompt(200), 4)
    log = LogitsLog(runner, monkeypatch)
    driver.run()
    with torch.inference_mode():
        expected = reference(torch.tensor([sequence.tokens])).logits[0, 199:-1]
    torch.testing.assert_close(torch.cat(log.steps), expected, atol=2e-4, rtol=0)


PHI3_LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {**LONGROPE, "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 9.0, 15.0]}
    | {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize(("length", "max_model_len"), [(50, 64), (100, 256)])
def test_longrope_takes_the_factors_of_its_context(
    length: int, max_model_len: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tiny_family("phi3", **PHI3_LONGROPE)
    runner = make_runner(save(reference, tmp_path), max_model_len=max_model_len)
    driver = PlanDriver(runner, chunk=33)
    [sequence] = driver.add(prompt(length), 4)
    log = LogitsLog(runner, monkeypatch)
    driver.run()
    with torch.inference_mode():
        expected = reference(torch.tensor([sequence.tokens])).logits[0, length - 1 : -1]
    torch.testing.assert_close(torch.cat(log.steps), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_short_floats(family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = tiny_family(family)
    runner = make_runner(save(reference, tmp_path), dtype=dtype)
    driver = PlanDriver(runner, chunk=8)
    [sequence] = driver.add(prompt(21), 3)
    log = LogitsLog(runner, monkeypatch)
    driver.run()
    with torch.inference_mode():
        exact = reference(torch.tensor([sequence.tokens])).logits[0, 20:-1]
        short = reference.to(dtype)(torch.tensor([sequence.tokens])).logits[0, 20:-1].float()
    error = (torch.cat(log.steps) - exact).abs().mean()
    assert error < 1.5 * (short - exact).abs().mean() + 1e-4
    assert log.steps[0].dtype == torch.float32


def test_a_tied_head_wins_over_a_stored_one(tmp_path: Path) -> None:
    folder = save(tiny_llama(tie_word_embeddings=True), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = make_runner(folder).model
    hidden = torch.randn(3, 64)
    normed = torch.nn.functional.rms_norm(hidden, (64,), tensors["model.norm.weight"], 1e-6)
    torch.testing.assert_close(
        model.logits(hidden), normed @ tensors["model.embed_tokens.weight"].T, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_norm.weight", "model.layers.2.mlp.up_proj.weight"])
def test_weights_that_would_be_left_out_are_refused(name: str, tmp_path: Path) -> None:
    folder = save(tiny_llama(), tmp_path)
    tensors = load_file(folder / "model.safetensors") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    make_runner(folder)
    save_file(tensors | {name: torch.ones(16)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=f"hold {name}, which this architecture does not know"):
        make_runner(folder)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = save(tiny_llama(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"model\.norm\.weight is int8; supported are float32"):
        make_runner(folder)
