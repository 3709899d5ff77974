"""Which architectures the worker runs, by the name in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pagemill_kernels.interface import Kernels, Quantization
from pagemill_kernels.linear import LinearFactory
from pagemill_shared.errors import ConfigurationError
from pagemill_worker.models.architectures import ARCHITECTURES
from pagemill_worker.models.config import CacheDescription
from pagemill_worker.models.decoder import DecoderModel
from pagemill_worker.models.weights import Weights


class Model(Protocol):
    """What the runner needs of a model; `DecoderModel` documents it."""

    cache: CacheDescription
    vocab_size: int
    linear_name: str

    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: Tensor, kernels: Kernels[Any], step: Any
    ) -> Tensor: ...

    def final(self, hidden: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def load_model(
    folder: Path,
    config: Mapping[str, Any],
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels[Any],
    quantization: Quantization = "none",
) -> Model:
    """The model in ``folder``, whose config.json is ``config``. ``kernels`` are those that it will run on.

    Raises:
        ConfigurationError: the architecture, a variant, a dtype, the quantisation or a tensor is not supported, or a
            tensor is missing.
    """
    try:
        make = LinearFactory(dtype, device, kernels, quantization)
    except ValueError as error:
        raise ConfigurationError(
            f"--quantization {quantization}: {error}; it runs with compiled kernels on a CPU, --dtype float32"
        ) from None
    architectures = config.get("architectures") or ["an unnamed architecture"]
    describe = next((ARCHITECTURES[name] for name in architectures if name in ARCHITECTURES), None)
    if describe is not None:
        weights = Weights(folder, dtype, device)
        if quantization == "gguf" and not weights.has_blocks:
            raise ConfigurationError(
                "--quantization gguf needs a model from a GGUF file that stores matrices in blocks of few bits; "
                "for others there is --quantization int8"
            )
        return DecoderModel(describe(config), weights, max_model_len, dtype, device, make, kernels)
    if quantization == "gguf":
        raise ConfigurationError(
            f"--quantization gguf: architecture {', '.join(map(str, architectures))} does not run on blocks; those "
            f"that do are {', '.join(ARCHITECTURES)}"
        )
    # Here and not above: importing transformers' models takes seconds.
    from pagemill_worker.models.general import load_general
    from pagemill_worker.models.paged_attention import UnsupportedError

    try:
        return load_general(folder, config, max_model_len, dtype, device, make, kernels)
    except UnsupportedError as error:
        raise ConfigurationError(
            f"architecture {', '.join(map(str, architectures))} is not supported: it {error}; supported are "
            f"{', '.join(ARCHITECTURES)}, and every causal language model of transformers that ties its tokens "
            "together by attention over keys and values of one size alone (as OPTForCausalLM and GPT2LMHeadModel)"
        ) from error
