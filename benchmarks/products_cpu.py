"""The compiled products of a layer in float32, int8 and GGUF's blocks, and in float32 with weights in fewer bits.

    python benchmarks/products_cpu.py [--rows 1,4,10,32,128,512] [--isa NAME] [--quick] [--json]

`int8`, `Q4_0` …: inputs in 8 bits. `float32 in Q4_1` …: float32 weights that lose nothing in that form; what comes out
has the bits that `float32` gives.

One thread's own processor time, the least of several turns in which all take part; a turn goes through the four
products of a layer of SmolLM2-135M, eight layers in a row, whose float32 weights together exceed the cache. Libraries
are compiled into a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from pagemill_kernels.blocks import BLOCK_KINDS, BlockKind, BlockMatrix, BlockPart, dequantised
from pagemill_kernels.cpu.build import compile_library, find_compiler, usable_isas
from pagemill_kernels.cpu.library import load_library
from pagemill_kernels.cpu.linear import BlockLinear, Int8Linear, PackedLinear
from pagemill_kernels.cpu.narrow import narrow_linear
from pagemill_kernels.cpu.pages import LargePages
from pagemill_kernels.interface import Linear

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [isa.name for isa in usable_isas()]
    parser.add_argument("--rows", default="1,4,10,32,128,512", help="comma-separated")
    parser.add_argument("--isa", choices=names, default=names[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library.so"
        compile_library(find_compiler(), next(isa for isa in usable_isas() if isa.name == arguments.isa), path)
        library = load_library(path)

    def stored(kind: BlockKind, weight: Tensor) -> BlockMatrix:
        return BlockMatrix((BlockPart(kind, torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[kind]))),))

    def blocks(kind: BlockKind) -> Callable[[Tensor], Linear]:
        return lambda weight: BlockLinear(library, stored(kind, weight), None)

    def narrow(weight: Tensor, matrix: BlockMatrix | None) -> Linear:
        made = narrow_linear(library, LargePages(), weight, None, matrix)
        assert made is not None
        return made

    def narrow_blocks(kind: BlockKind) -> Callable[[Tensor], Linear]:
        def make(weight: Tensor) -> Linear:
            matrix = stored(kind, weight)
            return narrow(dequantised(matrix.parts[0]), matrix)

        return make

    makers: dict[str, Callable[[Tensor], Linear]] = {
        "float32": lambda weight: PackedLinear(library, weight, None),
        "int8": lambda weight: Int8Linear(library, weight, None),
        **{kind: blocks(kind) for kind in BLOCK_KINDS},
        **{f"float32 in {kind}": narrow_blocks(kind) for kind in BLOCK_KINDS},
        "float32 in bf16": lambda weight: narrow(weight.bfloat16().float(), None),
    }
    weights = [torch.randn(shape) * 0.05 for _ in range(LAYERS) for shape in SHAPES]
    products = {name: [(make(weight), weight.shape[1]) for weight in weights] for name, make in makers.items()}
    cases = []
    for rows in map(int, arguments.rows.split(",")):
        inputs = {size: torch.randn(rows, size) for _, size in SHAPES}
        least = dict.fromkeys(products, float("inf"))
        for _ in range(3 if arguments.quick else 7):
            for name, linears in products.items():
                begun = time.thread_time()
                for linear, size in linears:
                    linear(inputs[size])
                least[name] = min(least[name], time.thread_time() - begun)
        cases += [
            {
                "rows": rows,
                "weights": name,
                "us_per_layer": round(seconds * 1e6 / LAYERS),
                "of_float32": round(least["float32"] / seconds, 2),
            }
            for name, seconds in least.items()
        ]
        print(f"{rows:4} rows", *(f"{name} {s * 1e6 / LAYERS:.0f} us" for name, s in least.items()), sep="  ")
    if arguments.json:
        print(json.dumps({"benchmark": "products_cpu", "isa": arguments.isa, "cases": cases}))


if __name__ == "__main__":
    main()
