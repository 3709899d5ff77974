"""What a set of kernels must do. The plain torch one in ``reference`` is the specification of every other.

The cache is one tensor ``[num_blocks, num_layers, 2, block_size, num_kv_heads, entry]``, so that one block is
contiguous across all layers and is copied or swapped in one transfer (PagedAttention, §4.3 and §4.5). Physical block 0
is padding: no sequence owns it. A *slot* is ``block * block_size + offset``; offsets into the cache exceed 32 bits.

An entry is one head's key or value of one token: ``head_dim`` numbers in the cache's dtype. In 8 bits (torch.int8, or
torch.float8_e4m3fn: OCP's e4m3) the four bytes of a float32 scale follow them: an element is its number times the
scale, which is the largest magnitude of the entry divided by the dtype's largest number (127, 448). So an entry is
written once and never changes when others are written beside it. The Triton kernels keep the scales elsewhere within
the block (see `gpu.eight_bits`): a pool belongs to one set of kernels, which alone reads what it wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from pagemill_kernels.blocks import BlockMatrix

PADDING_BLOCK = 0
SCALE_BYTES = 4
LARGEST_NUMBER = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest element of an entry becomes, by the dtypes of caches in 8 bits."""
Quantization = Literal["none", "int8", "gguf"]
"""How products store their weights: as they are, in 8 bits with one scale per output, or in a GGUF file's own blocks
where it has them."""


def entry_elements(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a cache of ``dtype`` that one head's key or value takes."""
    return head_dim + (SCALE_BYTES if dtype in LARGEST_NUMBER else 0)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The rows of one iteration, decode rows and prefill chunks alike, over one flattened token dimension.

    Row ``r`` computes the tokens ``query_starts[r]:query_starts[r + 1]`` (T in all), which are the last of its
    ``context_lens[r]`` tokens. The first ``num_decodes`` rows compute exactly one token each.

    Attributes:
        query_starts: [R + 1] int64 on the host, ascending from 0.
        context_lens: [R] int64 on the host, tokens of the row whose keys are in the cache once this iteration's
            keys are written; at least the row's query length.
        block_tables: [R, W] int64 on the host; entries beyond ceil(context_len / block_size) are not looked at.
        slot_mapping: [T] int64 on the host, where each token's key and value go.
        num_decodes: how many leading rows have one token.
        lines: None, or [R] int64 on the host, for sets of `ResidentKernels`: the tables stay on the cache's device, and
            row ``r`` has line ``lines[r]`` of ``block_tables``, there [S, W] int32; ``slot_mapping`` is int32 there.
        generated_from: None, or [R] int64 on the host: the position of the row's first generated token. The sums of the
            CPU's kernels do not run in one order for single tokens and for chunks. They compute what lies before this
            position as a chunk and the rest one by one, however many they are: a token that is computed again has the
            bits that it had.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    num_decodes: int
    lines: Tensor | None = None
    generated_from: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends.

    Attributes:
        scale: factor of the scores, usually head_dim ** -0.5.
        window: a token attends to itself and the ``window - 1`` tokens before it; None means to all before it.
        soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; None means off.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class Linear(ABC):
    """``x @ weight.T + bias + added``.

    Attributes:
        name: what computes it.
    """

    name: str

    @abstractmethod
    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[T, out] of [T, in], plus ``added`` [T, out] if it is given."""


Step = TypeVar("Step")
"""What a set of kernels prepares once for an iteration and uses in every layer: indices, masks, work sizes."""


class Kernels(ABC, Generic[Step]):
    """One set of kernels.

    Attributes:
        name: what the worker reports as the kernels that run.
        calls: how often each kernel ran, by method name; tests assert with it that the fast set really ran.
    """

    name: str

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def serves_cache(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        """Whether keys and values of ``dtype`` can lie in a cache of ``cache_dtype``."""
        return dtype == cache_dtype

    def tune(
        self, cache: Tensor, num_heads: int, dtype: torch.dtype, folder: Path, report: Callable[[str], None]
    ) -> None:
        """Chooses among the variants of its kernels, where it has any, by timing them over ``cache``, which it only
        reads: some seconds, at start, before anything is recorded.

        Args:
            num_heads: query heads of the layers to come.
            dtype: of their queries.
            folder: where choices are kept and looked for.
            report: told in one line each what was found.
        """

    @abstractmethod
    def prepare(self, batch: AttentionBatch, cache: Tensor) -> Step:
        """Everything about ``batch`` that is the same in all layers. Valid until the next ``prepare``."""

    @abstractmethod
    def rotate_and_write(
        self,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        cache: Tensor,
        step: Step,
        layer: int,
    ) -> None:
        """Applies the rotary embedding to queries and keys in place, then stores keys and values by slot mapping.

        Args:
            qkv: [T, num_heads + 2 * num_kv_heads, head_dim], queries, then keys, then values; last dimension
                contiguous.
            rotary: cosines and signed sines, each [T, 1, rotary_dim] as ``rotary_tables`` of the model gives them
                (the first half of the sines negated), or None for models without. Rotates the first ``rotary_dim``
                of ``head_dim`` in halves: pair i is (i, i + rotary_dim / 2).
        """

    @abstractmethod
    def attention(self, query: Tensor, cache: Tensor, step: Step, layer: int, spec: AttentionSpec) -> Tensor:
        """Causal paged attention for all rows.

        Query heads ``[h * G, (h + 1) * G)`` share key/value head ``h``, where G = num_heads / num_kv_heads. What
        the slots beyond a row's context hold (NaN included) has no effect on the result.

        Args:
            query: [T, num_heads, head_dim], rotated; last dimension contiguous.

        Returns:
            [T, num_heads * head_dim], in the query's dtype.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x`` [T, size], each row divided by its root mean square, times ``weight`` [size], of ``x``'s dtype or
        float32; the result is of ``x``'s dtype."""
        return functional.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)

    def norm_heads(self, qkv: Tensor, weights: Tensor, eps: float) -> None:
        """`rms_norm` of each of the first H heads by itself, in place.

        Args:
            qkv: [T, H or more, head_dim].
            weights: [H, head_dim], of ``qkv``'s dtype or float32.
        """
        heads = qkv[:, : weights.shape[0]]
        normed = functional.rms_norm(heads.to(weights.dtype), (weights.shape[1],), None, eps)
        torch.mul(normed, weights, out=normed)
        heads.copy_(normed)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, size] of [T, 2 * size]: silu of the first half, times the second."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, size] of [T, 2 * size]: gelu of the first half, times the second."""
        gate, up = gate_up.chunk(2, -1)
        return functional.gelu(gate).mul_(up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """As `gelu_mul`, with gelu's approximation by tanh."""
        gate, up = gate_up.chunk(2, -1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def own_linear(
        self, dtype: torch.dtype, quantization: Quantization = "none"
    ) -> Callable[[Tensor, Tensor | None], Linear] | None:
        """What makes this set's own product of weight [out, in] and bias [out], which are of ``dtype``; None where it
        has none: torch's do without quantisation."""
        return None

    def block_linear(self, dtype: torch.dtype) -> Callable[[BlockMatrix, Tensor | None], Linear] | None:
        """What makes this set's product of weights in GGUF's blocks and a bias, for inputs of ``dtype``; None where it
        has none."""
        return None

    def narrow_linear(
        self, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor | None, BlockMatrix | None], Linear | None] | None:
        """What makes this set's product of a weight and a bias, both of ``dtype``, that keeps the weight in fewer bits
        and computes what `own_linear`'s does, bit by bit. It is also given the blocks that a file stored the weight
        in, where it did, and makes None of a weight that would lose something. None where the set has no such product.
        """
        return None

    @abstractmethod
    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> int:
        """Copies whole blocks from one pool to another or the same: copy-on-write, swap-out (gather from the device
        pool into the host pool) and swap-in (scatter back) are all this.

        Args:
            source, destination: pools of the cache's layout, on any device.
            pairs: [K, 2] int64 on the host, (block in source, block in destination). No destination twice, and in
                one pool no block both source and destination.

        Returns:
            Bytes copied.
        """


class ResidentKernels(Kernels[Step]):
    """A set that reads block tables which stay on the device (``AttentionBatch.lines``), and whose launches for rows of
    one token can be made once and repeated with other contents, as CUDA graphs need it."""

    @abstractmethod
    def prepare_fixed(self, batch: AttentionBatch, cache: Tensor) -> Step:
        """As `prepare`, for a batch of decode rows with ``lines``. What is launched with this step depends on the
        number of rows alone; the contents are ``batch``'s until ``refill``."""

    @abstractmethod
    def refill(self, step: Step, batch: AttentionBatch) -> None:
        """Gives a fixed step the lines and lengths of another batch, with as many rows and the same tensors of tables
        and slots."""
