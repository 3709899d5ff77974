"""Builds the Triton kernels for GPUs that need not be there, and says what each takes of a processor.

    python gpu_builds.py TARGET[:HEAD_DIM,…[:DTYPE,…[:GROUP,…[:VARIANT,…]]]] …

A target is a compute capability (80, 90, 100); a dtype of 8 bits is the cache's, of a model in bfloat16. What is built
is what `TritonKernels` launches for such heads: launches are recorded and not run. Prints one JSON object a line;
registers, stack and local memory are read off the machine code by the cuobjdump that comes with triton. Must run
without Triton's interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagemill_kernels.gpu import attention, blocks, kernels, write
from pagemill_kernels.interface import AttentionBatch, AttentionSpec, entry_elements

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
VARIANTS = {
    "plain": AttentionSpec(0.1),
    "window": AttentionSpec(0.1, 1024),
    "soft_cap": AttentionSpec(0.1, 1024, 30.0),
}
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int8: "*i8",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass
class Recorder:
    """Stands for a kernel and keeps how it would be built for each launch: arguments are specialised as triton's own
    launcher does (pointers and integers that 16 divides, integers that are 1)."""

    kernel: Any
    builds: dict[str, tuple[Any, dict[str, Any]]] = field(default_factory=dict)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self.record

    def record(self, *arguments: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in named}
        options = {name: value for name, value in options.items() if value is not None}
        names = self.kernel.arg_names
        values = dict(zip(names, arguments, strict=False)) | named
        assert list(values) == names
        signature, constants, attributes = {}, dict(named), {}
        for index, (name, value) in enumerate(values.items()):
            parameter = self.kernel.params[index]
            is_special = not parameter.do_not_specialize
            if isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                is_divisible = not parameter.do_not_specialize_on_alignment
            elif name in named or (isinstance(value, int) and value == 1 and is_special):
                signature[name], constants[name] = "constexpr", value
                is_divisible = False
            elif isinstance(value, float):
                signature[name], is_divisible = "fp32", False
            else:
                signature[name] = "i64" if value >= 2**31 else "i32"
                is_divisible = value % 16 == 0
            if is_divisible and is_special:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        self.builds.setdefault(repr((signature, constants, attributes, options)), (source, options))


def recorders() -> list[Recorder]:
    """Puts a recorder in the place of every kernel."""
    found = []
    for module, name in (
        (attention, "attend"),
        (attention, "reduce_parts"),
        (write, "rotate_and_write"),
        (blocks, "copy_blocks"),
    ):
        found.append(Recorder(getattr(module, name)))
        setattr(module, name, found[-1])
    kernels._upload = lambda numbers, _: numbers  # type: ignore[assignment]
    return found


def launch(head_dim: int, cache_dtype: torch.dtype, group: int, variants: list[str], capability: int) -> None:
    """One iteration of a long decode row and a chunk, with tensors that have no memory."""
    kv_heads, block_size, tokens = 8, 16, 65
    run = kernels.TritonKernels(132, capability)
    entry = entry_elements(head_dim, cache_dtype)
    cache = torch.empty((600, 4, 2, block_size, kv_heads, entry), dtype=cache_dtype, device="meta")
    dtype = torch.bfloat16 if entry > head_dim else cache_dtype
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 1, tokens]),
        context_lens=torch.tensor([9000, 64]),
        block_tables=torch.ones(2, 600, dtype=torch.int64),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        num_decodes=1,
    )
    step = run.prepare(batch, cache)
    heads = group * kv_heads
    qkv = torch.empty((tokens, heads + 2 * kv_heads, head_dim), dtype=dtype, device="meta")
    turns = torch.empty((tokens, 1, head_dim), dtype=dtype, device="meta")
    run.rotate_and_write(qkv, (turns, turns), cache, step, 3)
    for variant in variants:
        run.attention(qkv[:, :heads], cache, step, 3, VARIANTS[variant])
    run.copy_blocks(cache, cache, torch.zeros(4, 2, dtype=torch.int64))


def build(source: Any, options: dict[str, Any], capability: int) -> dict[str, Any]:
    """What the machine code takes: registers a thread, bytes of stack and local memory a thread, of shared memory a
    program."""
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in dump.splitlines() if "REG:" in line)
    usage = dict(part.split(":") for part in line.split() if part.count(":") == 1)
    constants = {source.fn.arg_names[key[0]]: value for key, value in source.constants.items()}
    return {
        "target": capability,
        "kernel": source.fn.__name__,
        "dtype": next((t for name, t in source.signature.items() if name in ("query", "qkv")), "").lstrip("*"),
        "numbers": constants.get("NUMBERS"),
        "head_dim": constants.get("HEAD_DIM"),
        "group": constants.get("GROUP"),
        "rows": constants.get("ROWS"),
        "keys": constants.get("KEYS"),
        "variant": "+".join(v for v in ("window", "soft_cap") if constants.get(f"HAS_{v.upper()}")),
        "warps": options["num_warps"],
        "stages": options.get("num_stages"),
        "registers": int(usage["REG"]),
        "stack": int(usage["STACK"]),
        "local": int(usage["LOCAL"]),
        "shared": built.metadata.shared,
    }


def main(arguments: list[str]) -> None:
    made = recorders()
    for argument in arguments:
        target, *lists = argument.split(":")
        given = (*lists, "", "", "", "")[:4]
        head_dims, dtypes, groups, variants = ([entry for entry in part.split(",") if entry] for part in given)
        for recorder in made:
            recorder.builds.clear()
        for head_dim in map(int, head_dims or HEAD_DIMS):
            for dtype in dtypes or ("bf16", "fp32"):
                for group in map(int, groups or (4,)):
                    launch(head_dim, DTYPES[dtype], group, variants or list(VARIANTS), int(target))
        for recorder in made:
            for source, options in recorder.builds.values():
                print(json.dumps(build(source, options, int(target))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
