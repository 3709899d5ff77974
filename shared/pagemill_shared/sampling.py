"""Sampling parameters and the counter-based uniform numbers that sampling draws.

Random numbers are a pure function of (seed, sequence index, position): a result depends neither on the batch, nor on
preemption, nor on the worker, nor on a restart (design §4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

import numpy as np
import numpy.typing as npt

from pagemill_shared.message import Record
from pagemill_shared.schema import Bool, Float, Float32Array, Float32s, Int, Int32Array, Int32s, Optional, Text

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR = 262_144
"""Most characters of a grammar on the wire; requests are held to far less."""
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORD_TOKENS = 4096
"""Tokens of all bad words of a request together."""
MAX_SEQUENCES = 128
"""Most sequences of one request: parallel samples or beams."""
_NO_IDS = np.zeros(0, np.int32)
_NO_FLOATS = np.zeros(0, np.float32)


class EarlyStopping(IntEnum):
    """When a beam search ends, as in transformers' ``early_stopping``."""

    HEURISTIC = 0
    """False: when the best running beam, at its present length, cannot beat the worst finished hypothesis."""
    WHEN_FULL = 1
    """True: as soon as there are as many finished hypotheses as beams."""
    NEVER = 2
    """"never": only when no running beam can beat the worst finished hypothesis at any length."""


class Pooling(IntEnum):
    """What of the prompt's final hidden states (after the model's last norm) is reported."""

    NONE = 0
    LAST = 1
    """That of the last token."""
    MEAN = 2
    """The sum over all tokens; whoever adds the chunks up divides by their number."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingParams(Record):
    """How the tokens of one request are chosen, with every default resolved by the gateway.

    Attributes:
        temperature: 0 means greedy.
        top_k: 0 means off.
        top_p: probability mass kept, in (0, 1].
        min_p: least probability relative to the most likely token, in [0, 1].
        repetition_penalty: over prompt and output, 1 means off.
        presence_penalty, frequency_penalty: over the output alone, 0 means off.
        logit_bias_ids, logit_bias_values: same length, added to the logits.
        seed: feeds :func:`uniforms`.
        max_tokens: most output tokens; with 0 the prompt is computed and nothing sampled, and n is 1.
        min_tokens: end and stop tokens are banned before this many output tokens.
        ignore_eos: end tokens do not end the sequence (they are then ordinary tokens).
        eos_token_ids: the model's end tokens from all sources.
        stop_token_ids: the request's own stop tokens.
        allowed_token_ids: where it is not empty, no other tokens are sampled.
        bad_word_ids, bad_word_lengths: token sequences behind each other, and the length of each; the last token of a
            sequence is banned where the output ends with those before it.
        logprobs: None, or how many alternatives to report beside the sampled token.
        prompt_logprobs: the same for each token of the prompt but the first.
        pooling: see :class:`Pooling`.
        n: sequences to return. Without beams, as many are sampled.
        beam_width: 0, or the number of beams; then nothing is sampled.
        length_penalty: exponent of the length by which a hypothesis' sum of log-probabilities is divided.
        early_stopping: see :class:`EarlyStopping`.
        grammar: what the output must match, as llguidance reads it; empty for anything. Never with beams.
    """

    temperature: Annotated[float, Float(0.0, 1e4)] = 1.0
    top_k: Annotated[int, Int(0, MAX_TOKENS)] = 0
    top_p: Annotated[float, Float(0.0, 1.0)] = 1.0
    min_p: Annotated[float, Float(0.0, 1.0)] = 0.0
    repetition_penalty: Annotated[float, Float(1e-4, 1e4)] = 1.0
    presence_penalty: Annotated[float, Float(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, Float(-2.0, 2.0)] = 0.0
    logit_bias_ids: Annotated[Int32Array, Int32s(MAX_LOGIT_BIAS, low=0)] = field(default_factory=lambda: _NO_IDS)
    logit_bias_values: Annotated[Float32Array, Float32s(MAX_LOGIT_BIAS, low=-100.0)] = field(
        default_factory=lambda: _NO_FLOATS
    )
    seed: Annotated[int, Int(0, MAX_SEED)] = 0
    max_tokens: Annotated[int, Int(0, MAX_TOKENS)] = 16
    min_tokens: Annotated[int, Int(0, MAX_TOKENS)] = 0
    ignore_eos: Annotated[bool, Bool()] = False
    eos_token_ids: Annotated[Int32Array, Int32s(MAX_STOP_TOKEN_IDS, low=0)] = field(default_factory=lambda: _NO_IDS)
    stop_token_ids: Annotated[Int32Array, Int32s(MAX_STOP_TOKEN_IDS, low=0)] = field(default_factory=lambda: _NO_IDS)
    logprobs: Annotated[int | None, Optional(Int(0, MAX_LOGPROBS))] = None
    n: Annotated[int, Int(1, MAX_SEQUENCES)] = 1
    beam_width: Annotated[int, Int(0, MAX_SEQUENCES)] = 0
    length_penalty: Annotated[float, Float(-5.0, 5.0)] = 1.0
    early_stopping: Annotated[int, Int(0, 2)] = 0
    grammar: Annotated[str, Text(MAX_GRAMMAR)] = ""
    allowed_token_ids: Annotated[Int32Array, Int32s(MAX_ALLOWED_TOKEN_IDS, low=0)] = field(
        default_factory=lambda: _NO_IDS
    )
    bad_word_ids: Annotated[Int32Array, Int32s(MAX_BAD_WORD_TOKENS, low=0)] = field(default_factory=lambda: _NO_IDS)
    bad_word_lengths: Annotated[Int32Array, Int32s(MAX_BAD_WORD_TOKENS, low=1)] = field(default_factory=lambda: _NO_IDS)
    prompt_logprobs: Annotated[int | None, Optional(Int(0, MAX_LOGPROBS))] = None
    pooling: Annotated[int, Int(0, 2)] = 0

    @property
    def width(self) -> int:
        """Most sequences that run at once: beams, or parallel samples."""
        return self.beam_width or self.n

    @property
    def reports_prompt(self) -> bool:
        """Whether the chunks of its prompt have something to tell, be it only that the prompt has been computed."""
        return self.prompt_logprobs is not None or bool(self.pooling) or not self.max_tokens

    @property
    def needs_every_position(self) -> bool:
        """Whether each position of the prompt must be computed for it, however much of it is in the prefix cache."""
        return self.prompt_logprobs is not None or self.pooling == Pooling.MEAN

    @property
    def bad_words(self) -> list[Int32Array]:
        """The token sequences."""
        return np.split(self.bad_word_ids, np.cumsum(self.bad_word_lengths)[:-1]) if self.bad_word_ids.size else []

    @property
    def end_token_ids(self) -> Int32Array:
        """Every token that ends a sequence."""
        ends = self.stop_token_ids.tolist() + ([] if self.ignore_eos else self.eos_token_ids.tolist())
        return np.array(sorted(set(ends)), np.int32)

    @property
    def num_candidates(self) -> int:
        """Continuations that a beam search considers per step: enough to go on if the best ones all end."""
        return max(2, 1 + len(self.end_token_ids)) * self.beam_width


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


def uniforms(
    seeds: npt.ArrayLike, sequence_indices: npt.ArrayLike, positions: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, with 53 random bits.

    Args:
        seeds: [N] request seeds, 0 <= seed < 2**63.
        sequence_indices: [N] index of the sequence in its request.
        positions: [N] index of the sampled token in its sequence, prompt included.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
        state = _mix(state + _GOLDEN * (np.asarray(sequence_indices, dtype=np.uint64) + np.uint64(1)))
        state = _mix(state + _GOLDEN * (np.asarray(positions, dtype=np.uint64) + np.uint64(1)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
