"""Any decoder-only model of transformers whose layers attend through transformers' attention interface.

The model's own code runs, over one sequence that is really all rows of an iteration behind each other: attention alone
knows where one ends, and positions come from outside. Whether that is all that ties tokens together is tried at load:
the model's logits in paged chunks and steps must be those that it computes in one piece.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from pagemill_kernels.interface import AttentionBatch, Kernels, Linear
from pagemill_kernels.linear import LinearFactory
from pagemill_shared.errors import ConfigurationError
from pagemill_worker.memory import is_out_of_memory
from pagemill_worker.models.paged_attention import NAME, PagedAttention, UnsupportedError

LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
BATCH_ROPES = ("dynamic", "longrope")
"""Scalings of the rotary embedding that transformers chooses anew in each pass, for all its tokens."""
TRIAL_CHUNKS = (19, 14, 1, 1, 1)
"""Tokens of each forward pass of the trial: prefill in chunks that end within blocks, then decode."""
TRIAL_BLOCK = 16
TRIAL_ERROR = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Root mean square of the logits' difference, as a share of their own."""


class TransformersModel:
    """A model that transformers runs, all but its attention.

    Attributes:
        cache: what one token's keys and values take.
        vocab_size: columns of the logits.
        linear_name: what computes the matrix products.

    Raises:
        UnsupportedError: it does not compute here what it computes in one piece.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        make: LinearFactory,
        kernels: Kernels[Any],
    ) -> None:
        self._model = model
        self._body: nn.Module = model.base_model
        self._attention = PagedAttention(model, max_model_len)
        _check_positions(self._body)
        tokens = _trial_tokens(model, min(sum(TRIAL_CHUNKS), max_model_len), device)
        with torch.inference_mode():
            expected = _logits_in_one_piece(model, tokens)
            self.vocab_size = expected.shape[1]
            output = self._compute(tokens[:1], torch.zeros_like(tokens[:1]))  # records the calls of attention
            self.cache = self._attention.description()
            _check_layers(model.config.get_text_config(), self._attention.windows())
            setattr(model, model.base_model_prefix, _Bypass(self._body, type(output)))
            self._check_trial(self._try(tokens, dtype, kernels), expected, dtype)
            for part in (self._body, model):
                _replace_products(part, make)
            self.linear_name = make.name
            self._try(tokens, dtype, kernels)  # does nothing of it look into a product's weights?

    def forward(self, token_ids: Tensor, positions: Tensor, cache: Tensor, kernels: Kernels[Any], step: Any) -> Tensor:
        """As `DecoderModel.forward`, but what it returns has passed the final norm."""
        self._attention.begin(cache, kernels, step)
        hidden: Tensor = self._compute(token_ids, positions).last_hidden_state[0]
        return hidden

    @staticmethod
    def final(hidden: Tensor) -> Tensor:
        """[R, hidden_size] what ``forward`` returned: it is the last hidden state already."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab_size] float32 logits of [R, hidden_size] rows that ``forward`` returned."""
        logits: Tensor = self._model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()

    def _compute(self, token_ids: Tensor, positions: Tensor) -> Any:
        return self._body(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, return_dict=True
        )

    def _try(self, tokens: Tensor, dtype: torch.dtype, kernels: Kernels[Any]) -> Tensor:
        """[T, vocab_size] logits of ``tokens``, by chunks and steps over a cache of its own."""
        c, width = self.cache, -(-tokens.numel() // TRIAL_BLOCK)
        # Blocks in falling order: nothing may rely on them being in a row.
        table = torch.arange(width, 0, -1)
        shape = (width + 1, c.num_layers, 2, TRIAL_BLOCK, c.num_kv_heads, c.head_dim)
        cache = torch.full(shape, torch.nan, dtype=dtype, device=tokens.device)
        logits, first = [], 0
        for count in TRIAL_CHUNKS:
            positions = torch.arange(first, first + count)[: max(0, tokens.numel() - first)]
            if not positions.numel():
                break
            batch = AttentionBatch(
                query_starts=torch.tensor([0, positions.numel()]),
                context_lens=positions[-1:] + 1,
                block_tables=table.unsqueeze(0),
                slot_mapping=table[positions // TRIAL_BLOCK] * TRIAL_BLOCK + positions % TRIAL_BLOCK,
                num_decodes=int(count == 1),
            )
            positions = positions.to(tokens.device)
            hidden = self.forward(tokens[positions], positions, cache, kernels, kernels.prepare(batch, cache))
            logits.append(self.logits(hidden))
            first += count
        return torch.cat(logits)

    @staticmethod
    def _check_trial(computed: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
        scale = expected.square().mean().sqrt()
        error = float((computed - expected).square().mean().sqrt() / scale)
        if not error <= TRIAL_ERROR[dtype]:
            raise UnsupportedError(
                "ties tokens together by more than attention: "
                f"by blocks its logits are {error:.0%} off those in one piece"
            )


def load_general(
    folder: Path,
    config: Mapping[str, Any],
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    make: LinearFactory,
    kernels: Kernels[Any],
) -> TransformersModel:
    """The model in ``folder``, whatever its architecture.

    Raises:
        UnsupportedError: its architecture does not run here.
        ConfigurationError: its weights are not those that its configuration calls for.
    """
    kind = _model_class(config)
    _check_dtypes(folder)
    was_shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = kind.from_pretrained(
            folder,
            config=_configuration(folder),
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported then
        )
    except (ValueError, LookupError, TypeError, OSError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedError(f"cannot be loaded by transformers {transformers.__version__}: {error}") from error
    finally:
        if was_shown:
            transformers.utils.logging.enable_progress_bar()
    _check_found(folder, found)
    model = model.eval().requires_grad_(False).to(device)
    try:
        return TransformersModel(model, max_model_len, dtype, device, make, kernels)
    except (AttributeError, TypeError, LookupError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedError(f"does not run in parts: {type(error).__name__}: {error}") from error


def _model_class(config: Mapping[str, Any]) -> type[PreTrainedModel]:
    """The class of transformers, refused by what is known of it without loading it."""
    name = (config.get("architectures") or [None])[0]
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")), ())
    if name not in ((known,) if isinstance(known, str) else known):
        raise UnsupportedError(f"is not among the causal language models of transformers {transformers.__version__}")
    kind: type[PreTrainedModel] = getattr(transformers, str(name))
    if config.get("is_encoder_decoder"):
        raise UnsupportedError("is an encoder and a decoder")
    if kind._is_stateful:
        raise UnsupportedError("keeps a state that is no keys and values (a state-space or linear-attention model)")
    if not kind._supports_attention_backend:
        raise UnsupportedError("does not attend through transformers' attention interface")
    types = config.get("layer_types")
    other = next((kind for kind in types if kind not in LAYER_TYPES), None) if isinstance(types, list) else None
    if other is not None:
        raise UnsupportedError(f"has layers of type {other!r}")
    return kind


def _configuration(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("is an encoder and a decoder")
    return config


def _check_dtypes(folder: Path) -> None:
    """transformers would take quantised numbers without their scales for weights."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                dtype = file.get_slice(name).get_dtype()
                if dtype.startswith(("F8", "F4", "I8", "U8")) and not name.endswith("bias"):  # a mask may be called so
                    raise ConfigurationError(
                        f"{folder}: tensor {name} is {dtype}; supported are float32, float16, bfloat16"
                    )


def _check_found(folder: Path, found: Mapping[str, Any]) -> None:
    """transformers would make up what is missing, and leave out what it does not know."""
    for kind, what in (
        ("missing_keys", "lack the tensor {}"),
        ("mismatched_keys", "hold {} in another shape than config.json calls for"),
        ("unexpected_keys", "hold {}, which this architecture does not know"),
    ):
        for entry in sorted(map(str, found.get(kind) or ())):
            raise ConfigurationError(f"{folder}: the weights {what.format(entry)}")


def _check_positions(body: nn.Module) -> None:
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise UnsupportedError("takes no positions from outside")


def _check_layers(config: Any, windows: list[int | None]) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(entry for entry in rope.values() if isinstance(entry, dict))):
        if parameters.get("rope_type") in BATCH_ROPES:
            raise UnsupportedError(f"turns tokens ({parameters['rope_type']}) by the longest sequence of a batch")
    layers = getattr(config, "num_hidden_layers", len(windows))
    if len(windows) != layers:
        raise UnsupportedError(f"attends through the interface {len(windows)} times in {layers} layers")
    for kind, window in zip(getattr(config, "layer_types", None) or (), windows, strict=False):
        if (kind == "sliding_attention") != (window is not None):
            raise UnsupportedError(f"has a layer of {kind} that attends with window {window}")


def _trial_tokens(model: PreTrainedModel, count: int, device: torch.device) -> Tensor:
    size = model.get_input_embeddings().weight.shape[0]
    return torch.randint(0, size, (count,), generator=torch.Generator().manual_seed(0)).to(device)


def _logits_in_one_piece(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[T, vocab_size] float32, by transformers alone."""
    model.set_attn_implementation("eager")
    logits: Tensor = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0].float()
    model.set_attn_implementation(NAME)
    return logits


class _Bypass(nn.Module):
    """Stands where a causal model has its body and returns the hidden states it is given, so that the model makes
    logits of them, with whatever it does besides the product."""

    def __init__(self, body: nn.Module, output: type[Any]) -> None:
        super().__init__()
        self.config = body.config
        self._output = output

    @property
    def decoder(self) -> _Bypass:
        """OPT reaches through its body for the decoder in it."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self._output(last_hidden_state=inputs_embeds)


class _Product(nn.Module):
    """One of our products in the place of a module of torch or transformers."""

    def __init__(self, product: Linear) -> None:
        super().__init__()
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _replace_products(part: nn.Module, make: LinearFactory) -> None:
    """Products of one weight, by exactly the classes known here: a class derived from them may do more."""
    for parent in list(part.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _Product(make(child.weight, child.bias)))
            elif type(child) is Conv1D:
                weight, bias = child.get_parameter("weight"), child.get_parameter("bias")
                setattr(parent, name, _Product(make(weight.T.contiguous(), bias)))
