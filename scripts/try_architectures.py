"""Which of transformers' causal language models the general path runs: each as a tiny model with random weights.

Prints one line per architecture, and takes some minutes. docs/models.md has the outcome.
"""

from __future__ import annotations

import signal
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagemill_kernels.linear import LinearFactory
from pagemill_kernels.reference import TorchKernels
from pagemill_shared.errors import ConfigurationError
from pagemill_worker.models.architectures import ARCHITECTURES
from pagemill_worker.models.config import read_config
from pagemill_worker.models.general import load_general
from pagemill_worker.models.paged_attention import UnsupportedError

CPU = torch.device("cpu")
MOST_PARAMETERS = 60_000_000
SECONDS = 120
"""For one architecture."""
SMALL: dict[str, Any] = {
    "vocab_size": 160,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "rotary_dim", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
    "sliding_window": 11,
}
"""By the names that configurations have for it."""


def outcome(model_type: str, architecture: str) -> tuple[str, str]:
    """("runs" | "refused" | "not tried", why)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            tiny(model_type, architecture).save_pretrained(folder)
        except Exception as error:  # whatever a configuration of this size is to it
            return "not tried", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:100]}"
        make = LinearFactory(torch.float32, CPU)
        try:
            load_general(folder, read_config(folder), 256, torch.float32, CPU, make, TorchKernels())
        except (UnsupportedError, ConfigurationError) as error:
            return "refused", str(error).splitlines()[0][:140]
    return "runs", ""


def tiny(model_type: str, architecture: str) -> transformers.PreTrainedModel:
    """Raises: whatever transformers raises for sizes that do not go together."""
    kind, configuration = getattr(transformers, architecture), transformers.CONFIG_MAPPING[model_type]
    known = configuration()
    fields = {key: value for key, value in SMALL.items() if key in known.to_dict() or key in known.attribute_map}
    config = configuration(**fields)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in kind(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters at these sizes")
    torch.manual_seed(0)
    return kind(configuration(**fields)).eval()


def overdue(*_: object) -> None:
    raise UnsupportedError(f"takes more than {SECONDS} seconds")


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGALRM, overdue)
    counts: Counter[str] = Counter()
    for model_type, named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        architecture = named if isinstance(named, str) else named[0]
        if architecture in ARCHITECTURES:
            continue
        signal.alarm(SECONDS)
        result, why = outcome(model_type, architecture)
        signal.alarm(0)
        counts[result] += 1
        print(f"{architecture:44} {result:10} {why}", flush=True)
    print(f"transformers {transformers.__version__}: {dict(counts)}")


if __name__ == "__main__":
    main()
