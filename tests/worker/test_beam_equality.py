"""The scheduler's beam search, fed by a small random model, against transformers' ``generate(num_beams=…)``."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from pagemill_scheduler.beams import BeamSearch, Candidates, Hypothesis
from pagemill_shared.messages import FinishReason
from pagemill_shared.sampling import EarlyStopping, SamplingParams

VOCAB = 29
STOPPING = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.WHEN_FULL: True,
    EarlyStopping.NEVER: "never",
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """In float64, so that batch and cache change no rank; both searches sum log-probabilities in float32."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.35,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).double().eval()


def search(model: LlamaForCausalLM, prompt: list[int], sampling: SamplingParams) -> list[Hypothesis]:
    """All of our hypotheses, by plain forward passes over whole sequences."""
    beams = BeamSearch(sampling)
    outputs = [np.zeros(0, np.int32)]
    while not beams.done:
        ids = torch.tensor([[*prompt, *output.tolist()] for output in outputs])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, -1]
        best = torch.log_softmax(logits.float(), -1).topk(min(sampling.num_candidates, VOCAB))
        candidates = [
            Candidates(row.numpy().astype(np.int32), values.numpy())
            for row, values in zip(best.indices, best.values, strict=True)
        ]
        steps = beams.advance(candidates, outputs, [[] for _ in outputs])
        outputs = [np.append(outputs[step.parent], np.int32(step.token)).astype(np.int32) for step in steps]
    return beams.hypotheses


def reference(
    model: LlamaForCausalLM, prompt: list[int], sampling: SamplingParams
) -> tuple[list[list[int]], list[float]]:
    """transformers' output tokens, up to and with the end token, and scores."""
    ends = sampling.end_token_ids.tolist()
    config = GenerationConfig(
        do_sample=False,
        num_beams=sampling.beam_width,
        num_return_sequences=sampling.n,
        max_new_tokens=sampling.max_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=STOPPING[EarlyStopping(sampling.early_stopping)],
        eos_token_id=ends or None,
        pad_token_id=VOCAB - 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        tokens.append(row[: end + 1])
    return tokens, found.sequences_scores.tolist()


SETTINGS = list(
    product(
        EarlyStopping,
        (-1.0, 0.0, 1.0, 2.0),
        ([], [5], [2, 11, 17]),  # end tokens
        ((1, 1), (2, 2), (3, 1), (4, 3)),  # width, n
    )
)


def test_tokens_and_scores_are_those_of_transformers(model: LlamaForCausalLM) -> None:
    assert len(SETTINGS) >= 30
    generator = np.random.default_rng(1)
    finishes = set()
    for number, (stopping, penalty, ends, (width, n)) in enumerate(SETTINGS):
        if width == 1:
            continue  # transformers then searches greedily and gives no scores
        prompt = generator.integers(0, VOCAB - 1, size=1 + number % 7).tolist()
        sampling = SamplingParams(
            temperature=0.0,
            beam_width=width,
            n=n,
            max_tokens=1 + number % 13,
            length_penalty=penalty,
            early_stopping=stopping,
            eos_token_ids=np.array(ends[:1], np.int32),
            stop_token_ids=np.array(ends[1:], np.int32),
        )
        wanted, scores = reference(model, prompt, sampling)
        found = search(model, prompt, sampling)[:n]
        what = f"{stopping.name}, length_penalty {penalty}, ends {ends}, {n} of {width}, prompt {prompt}"
        assert [hypothesis.tokens.tolist() for hypothesis in found] == wanted, what
        assert [float(hypothesis.score) for hypothesis in found] == pytest.approx(scores, rel=1e-5), what
        finishes |= {hypothesis.finish for hypothesis in found}
    assert finishes == {FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH}


def test_one_beam_is_a_greedy_search(model: LlamaForCausalLM) -> None:
    prompt = [3, 1, 4]
    [hypothesis] = search(model, prompt, SamplingParams(temperature=0.0, beam_width=1, n=1, max_tokens=12))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        config = GenerationConfig(do_sample=False, max_new_tokens=12, pad_token_id=VOCAB - 1)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert hypothesis.tokens.tolist() == found[0, 3:].tolist()
