"""transformers over a prepared model: what a server's outputs must be, and how clear each of its choices is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagemill_scheduler.beams import BeamSearch, Candidates
from pagemill_shared.sampling import EarlyStopping, SamplingParams, uniforms

EARLY_STOPPING = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.WHEN_FULL, "never": EarlyStopping.NEVER}


@dataclass(frozen=True)
class ReferenceSearch:
    """A beam search of transformers.

    Attributes:
        outputs: of the beams, best first, up to their end token.
        scores: sequences_scores.
        least_gap: the closest call of the search, in log-probability: between neighbours among the best candidates of a
            step, or between the scores of finished beams.
    """

    outputs: list[list[int]]
    scores: list[float]
    least_gap: float


class ReferenceModel:
    """In fp32, with the end tokens of the model's generation config."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()

    @property
    def end_ids(self) -> list[int]:
        ids = self.model.generation_config.eos_token_id
        return [ids] if isinstance(ids, int) else list(ids)

    @torch.inference_mode()
    def search(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, fields: dict[str, Any]
    ) -> list[ReferenceSearch]:
        """generate() for all ``prompts`` in one batch.

        Args:
            fields: beam settings as requests have them; ``repetition_penalty`` only for prompts of one length, since
                transformers counts padding as seen.
        """
        longest = max(map(len, prompts))
        width = fields["beam_width"]
        pad = self.end_ids[0]
        result = self.model.generate(
            torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            max_new_tokens=max_tokens,
            min_new_tokens=fields.get("min_tokens"),
            num_beams=width,
            num_return_sequences=width,
            length_penalty=fields.get("length_penalty", 1.0),
            early_stopping=fields.get("early_stopping", False),
            repetition_penalty=fields.get("repetition_penalty"),
            do_sample=False,
            pad_token_id=pad,
            output_scores=True,
            return_dict_in_generate=True,
        )
        outputs = [self._up_to_end(line) for line in result.sequences[:, longest:].tolist()]
        scores = result.sequences_scores.tolist()
        sampling = SamplingParams(
            max_tokens=max_tokens,
            beam_width=width,
            length_penalty=fields.get("length_penalty", 1.0),
            early_stopping=EARLY_STOPPING[fields.get("early_stopping", False)],
            eos_token_ids=np.array(self.end_ids, np.int32),
        )
        searches = []
        for number in range(len(prompts)):
            mine = slice(number * width, (number + 1) * width)
            steps = [step[mine] for step in result.scores]
            searches.append(ReferenceSearch(outputs[mine], scores[mine], _least_gap(steps, sampling, outputs[mine])))
        return searches

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """[len(output), vocab_size] logits that each output token was chosen from."""
        ids = torch.tensor([[*prompt, *output]])
        values: Tensor = self.model(ids).logits[0, len(prompt) - 1 : -1]
        return values

    def greedy_gaps(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Logit of the best token at each position minus that of the second best."""
        best = self.logits(prompt, output).topk(2).values
        gaps: list[float] = (best[:, 0] - best[:, 1]).tolist()
        return gaps

    def margins(
        self, prompt: Sequence[int], output: Sequence[int], temperature: float, seed: int, sequence: int
    ) -> list[float]:
        """How far inside a sampled token's part of the distribution its uniform number lies; negative if outside."""
        probabilities = (self.logits(prompt, output).double() / temperature).softmax(-1)
        ends = probabilities.cumsum(-1)
        positions = np.arange(len(prompt), len(prompt) + len(output))
        numbers = torch.from_numpy(uniforms(np.full(len(output), seed), np.full(len(output), sequence), positions))
        ids = torch.tensor(list(output)).unsqueeze(1)
        upper = ends.gather(1, ids).squeeze(1)
        lower = upper - probabilities.gather(1, ids).squeeze(1)
        margins: list[float] = torch.minimum(upper - numbers, numbers - lower).tolist()
        return margins

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        ends = [index for index, token in enumerate(tokens) if token in self.end_ids]
        return tokens[: ends[0] + 1] if ends else tokens


def _least_gap(steps: Sequence[Tensor], sampling: SamplingParams, outputs: list[list[int]]) -> float:
    """Follows a search through the [beams, vocab_size] log-probabilities of its steps; it must end in ``outputs``."""
    search = BeamSearch(sampling)
    beams = [np.zeros(0, np.int32)]
    gaps: list[float] = []
    for step in steps:
        top = step[: len(beams)].topk(sampling.num_candidates + 1)
        totals = np.sort((top.values.numpy() + search.scores[:, None]).ravel())[::-1]
        gaps.extend((totals[: sampling.num_candidates] - totals[1 : sampling.num_candidates + 1]).tolist())
        ids = top.indices.numpy().astype(np.int32)
        candidates = [Candidates(ids[i], top.values[i].numpy()) for i in range(len(beams))]
        going_on = search.advance(candidates, beams, [[] for _ in beams])
        beams = [np.append(beams[each.parent], np.int32(each.token)).astype(np.int32) for each in going_on]
        if search.done:
            break
    assert [hypothesis.tokens.tolist() for hypothesis in search.hypotheses] == outputs
    scores = [float(hypothesis.score) for hypothesis in search.hypotheses]
    gaps.extend(better - worse for better, worse in pairwise(scores))
    return min(gaps)
