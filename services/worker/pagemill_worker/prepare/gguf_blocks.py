"""The quantised matrices of a GGUF file, kept as blocks beside the float32 weights.

They lie in a file of safetensors' format: by the tensor's name in the model [rows, bytes of a row] uint8, and in the
metadata, by the same name, the format of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from pagemill_kernels.blocks import BLOCK_KINDS, BLOCK_SIZE, BlockKind
from pagemill_worker.prepare.gguf_architecture import MappedTensor
from pagemill_worker.prepare.gguf_file import GgufTensor
from pagemill_worker.prepare.safetensors_stream import StreamedTensor

_KEPT: dict[GGMLQuantizationType, BlockKind] = {GGMLQuantizationType[kind]: kind for kind in BLOCK_KINDS}


def block_kind(tensor: GgufTensor) -> BlockKind | None:
    """The format in which the tensor's blocks are kept: their own where there are kernels for it, else 8 bits, which
    adds little to the error of the fewer bits that they had; None for vectors, and for matrices that are not in blocks.
    """
    elements, _ = GGML_QUANT_SIZES[tensor.kind]
    if len(tensor.shape) != 2 or elements == 1 or tensor.shape[1] % BLOCK_SIZE:
        return None
    return _KEPT.get(tensor.kind, "Q8_0")


def kept_blocks(entry: MappedTensor, kind: BlockKind) -> StreamedTensor:
    tensor = entry.source
    wanted = GGMLQuantizationType[kind]
    chunks: Iterator[npt.NDArray[np.uint8]]
    if tensor.kind == wanted:
        chunks = tensor.stored_rows(entry.order)
    else:
        chunks = (quantize(chunk, wanted) for chunk in tensor.rows(entry.order))
    elements, size = GGML_QUANT_SIZES[wanted]
    return StreamedTensor(entry.name, (tensor.shape[0], tensor.shape[1] // elements * size), chunks, np.dtype(np.uint8))
