"""Logits of tiny random checkpoints against transformers': whole prompts, chunks, decode and mixed batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagemill_testing.plan_driver import PlanDriver
from pagemill_testing.tiny_models import VOCAB, make_runner, save, tiny_llama
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.runner import Runner

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
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


class LogitsLog:
    """Keeps the logits that a runner computes."""

    def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Tensor] = []
        compute = runner.model.logits

        def noted(hidden: Tensor) -> Tensor:
            logits = compute(hidden)
            self.steps.append(logits.clone())
            return logits

        monkeypatch.setattr(runner.model, "logits", noted)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = tiny_llama(**VARIANTS[name])
    runner = make_runner(save(reference, tmp_path))
    for chunk in (1000, 7):
        driver = PlanDriver(runner, chunk=chunk)
        [first] = driver.add(prompt(21), 6)
        [second] = driver.add(prompt(3, 1), 6)
        log = LogitsLog(runner, monkeypatch)
        driver.run()
        with torch.inference_mode():
            expected = {s: reference(torch.tensor([s.tokens])).logits[0] for s in (first, second)}
        computed = torch.cat(log.steps)
        # Every row of logits that was computed is one of these, and all of them were.
        for sequence in (first, second):
            for position in range(len(sequence.prompt) - 1, len(sequence.tokens) - 1):
                distance = (computed - expected[sequence][position]).abs().amax(-1).min()
                assert distance < 2e-4
        assert computed.shape[0] == 12


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = tiny_llama()
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "FalconForCausalLM is not supported; supported are LlamaForCausalLM",
        ),
        ({"architectures": None}, "unnamed architecture"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs the number factor"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"intermediate_size": 97}, r"has shape \(96, 64\), config.json calls for \(97, 64\)"),
        ({"attention_bias": True}, "lack the tensor model.layers.0.self_attn.q_proj.bias"),
        ({"num_hidden_layers": 3}, "lack the tensor model.layers.2"),
        ({"tie_word_embeddings": None}, None),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    folder = save(tiny_llama(), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    if message is None:
        make_runner(folder)
    else:
        with pytest.raises(ConfigurationError, match=message):
            make_runner(folder)


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
