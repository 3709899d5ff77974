"""From settings to a runner that is ready for plans, and the hello that says so."""

from __future__ import annotations

import os
import socket
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagemill_kernels.interface import Kernels, ResidentKernels
from pagemill_kernels.reference import TorchKernels
from pagemill_kernels.select import select_kernels
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.manifest import ModelManifest, read_manifest
from pagemill_shared.messages import WorkerHello
from pagemill_shared.settings import WorkerSettings
from pagemill_worker import measure, memory, threads
from pagemill_worker.cache import KVCache, block_bytes
from pagemill_worker.first_touch import touch_beside
from pagemill_worker.forward import Forward, HostForward, ResidentForward
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.graphs import CudaRecorder
from pagemill_worker.models.config import read_config
from pagemill_worker.models.decoder import DecoderModel
from pagemill_worker.models.registry import Model, load_model
from pagemill_worker.models.weights import weights_bytes
from pagemill_worker.moves import CudaLanes, OneLane
from pagemill_worker.prepare import Report, prepare_model
from pagemill_worker.runner import Runner

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CACHE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def load_worker(settings: WorkerSettings, report: Report) -> tuple[Runner, WorkerHello]:
    """Loads the model, sizes and allocates the KV cache, warms up and measures.

    Args:
        report: told what is being done.

    Returns:
        The runner, which awaits `Runner.begin`, and the hello to send.

    Raises:
        ConfigurationError: anything about model, device, dtype or memory that cannot be, with what is supported or how
            much there is.
    """
    folder = prepare_model(settings.model, settings.cache_dir, report)
    manifest = read_manifest(folder)
    device = _device(settings.device)
    config = read_config(folder)
    dtype = _dtype(settings.dtype, config.get("dtype") or config.get("torch_dtype"), device)
    max_model_len = _max_model_len(settings.max_model_len, manifest)
    report(f"loading {manifest.name} as {_name(dtype)} on {device}", None)
    kernels = select_kernels(device, settings.cache_dir, lambda text: report(text, None), prebuilt=settings.kernels_dir)
    model = _model(settings, folder, config, manifest.name, max_model_len, dtype, device, kernels)
    cache = _cache(settings, model, _cache_dtype(settings.kv_cache_dtype, dtype, kernels), device, report)
    _tune(settings, model, cache, kernels, device, dtype, report)
    grammars = GrammarCompiler(folder, model.vocab_size, manifest.eos_token_ids)
    forward = _forward(settings, model, cache, kernels, device, max_model_len)
    lanes = CudaLanes(device) if device.type == "cuda" else OneLane()
    runner = Runner(model, cache, kernels, max_model_len, device, grammars, forward=forward, lanes=lanes)
    report("warming up", None)
    measure.decode_seconds(runner, 1)  # records decode steps, too, where they are recorded
    runner.threads = _threads(settings.num_threads, runner, device, report)
    prefill = measure.prefill_rate(runner)
    swapped = measure.swap_rate(runner)
    swapping = f"{swapped / memory.GIB:.1f} GiB/s to swap" if swapped else "no swapping"
    report(f"ready: {prefill:.0f} prompt tokens/s, {swapping}", 1.0)
    if device.type == "cpu":
        touch_beside(cache.pool)  # after what was measured
    return runner, WorkerHello(
        identity=f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        fingerprint=manifest.fingerprint,
        model=manifest.name,
        device=_device_name(device, runner.threads),
        dtype=_name(dtype),
        kernels=f"{runner.kernels.name}+{model.linear_name}",
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        num_swap_blocks=cache.num_swap_blocks,
        block_bytes=cache.block_bytes,
        prefill_tokens_per_s=prefill,
        swap_bytes_per_s=swapped,
    )


def _model(
    settings: WorkerSettings,
    folder: Path,
    config: dict[str, Any],
    name: str,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels[Any],
) -> Model:
    """Refused before it is read where it cannot fit: a system that promises more memory than it has would end the
    process in the middle."""
    is_narrow = settings.quantization == "none" and kernels.narrow_linear(dtype) is not None
    asked, free = weights_bytes(folder, dtype, is_narrow), memory.free_memory(device)
    if settings.quantization != "none":
        asked //= dtype.itemsize
    too_large = ConfigurationError(
        f"the weights of {name} ({asked / memory.GIB:.2f} GiB as {_name(dtype)}, --quantization "
        f"{settings.quantization}) do not fit into {free / memory.GIB:.2f} GiB of free memory on {device}"
    )
    if asked > free:
        raise too_large
    try:
        return load_model(folder, config, max_model_len, dtype, device, kernels, settings.quantization)
    except (MemoryError, RuntimeError) as error:
        if memory.is_out_of_memory(error):
            raise too_large from None
        raise


def _forward(
    settings: WorkerSettings,
    model: Model,
    cache: KVCache,
    kernels: Kernels[Any],
    device: torch.device,
    max_model_len: int,
) -> Forward:
    """Rows that stand on the device where its kernels read them there. Steps are recorded for models of our own code:
    transformers' may look at numbers on the way."""
    if device.type != "cuda" or not isinstance(kernels, ResidentKernels) or isinstance(kernels, TorchKernels):
        return HostForward(model, cache, kernels, device)
    recorder = partial(CudaRecorder, device) if settings.cuda_graphs and isinstance(model, DecoderModel) else None
    return ResidentForward(model, cache, kernels, device, max_model_len, recorder)


def _tune(
    settings: WorkerSettings,
    model: Model,
    cache: KVCache,
    kernels: Kernels[Any],
    device: torch.device,
    dtype: torch.dtype,
    report: Report,
) -> None:
    """--autotune: before decode steps are recorded with what it chooses."""
    if settings.autotune and device.type == "cuda" and isinstance(model, DecoderModel):
        kernels.tune(cache.pool, model.config.num_heads, dtype, settings.cache_dir, lambda text: report(text, None))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: torch finds no CUDA device here; use --device cpu")
    return torch.device(name)


def _device_name(device: torch.device, policy: threads.Threads) -> str:
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"[:64]
    return f"cpu ({policy.of(measure.DECODE_ROWS)} threads, {policy.of(measure.PREFILL_TOKENS)} for prefill)"


def _dtype(name: str, stored: object, device: torch.device) -> torch.dtype:
    """The model's own on a GPU; float32 on a CPU, most of which have no fast arithmetic for the others."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = DTYPES.get(str(stored), torch.bfloat16)
    return torch.bfloat16 if own == torch.float32 else own


def _cache_dtype(name: str, dtype: torch.dtype, kernels: Kernels[Any]) -> torch.dtype:
    """--kv-cache-dtype; the dtype of keys and values by default."""
    wanted = CACHE_DTYPES.get(name, dtype)
    if not kernels.serves_cache(dtype, wanted):
        have = [each for each, other in CACHE_DTYPES.items() if kernels.serves_cache(dtype, other)]
        raise ConfigurationError(
            f"--kv-cache-dtype {name}: the {kernels.name} kernels have no such cache for a model in {_name(dtype)}; "
            f"there are {', '.join(['auto', *have])}"
        )
    return wanted


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_model_len(wanted: int | None, manifest: ModelManifest) -> int:
    if wanted is None:
        return manifest.max_model_len
    if wanted > manifest.max_model_len:
        raise ConfigurationError(
            f"--max-model-len {wanted} is more than the {manifest.max_model_len} tokens of {manifest.name}"
        )
    return wanted


def _cache(settings: WorkerSettings, model: Model, dtype: torch.dtype, device: torch.device, report: Report) -> KVCache:
    each = block_bytes(model.cache, settings.block_size, dtype)
    size = memory.size_pool(
        num_blocks=settings.num_kv_blocks,
        memory_gib=settings.kv_cache_memory,
        block_bytes=each,
        free=memory.free_memory(device),
        device=device,
    )
    # On a CPU the pool is host memory as well, and not in use yet: it is backed as it is written.
    host = memory.free_memory(torch.device("cpu")) - (size.num_blocks * each if device.type == "cpu" else 0)
    swap = memory.size_swap(
        num_swap_blocks=settings.num_swap_blocks, num_blocks=size.num_blocks, block_bytes=each, free=host
    )
    cache = KVCache(model.cache, settings.block_size, size.num_blocks, swap.num_blocks, dtype, device)
    report(
        f"KV cache of {size.num_blocks * each / memory.GIB:.2f} GiB ({size.reason}): {size.num_blocks} blocks, "
        f"{size.num_blocks * settings.block_size} tokens; swap space of {swap.num_blocks * each / memory.GIB:.2f} GiB "
        f"({swap.reason}): {swap.num_blocks} blocks",
        None,
    )
    return cache


def _threads(wanted: int | None, runner: Runner, device: torch.device, report: Report) -> threads.Threads:
    """--num-threads, or what pays: measured for a decode step and for a prefill chunk, and then while it runs."""
    if wanted is not None or device.type != "cpu":
        count = wanted or 1
        return threads.ThreadPolicy(count, count)

    def decode(count: int) -> float:
        runner.threads = threads.ThreadPolicy(count, count)
        return measure.decode_seconds(runner, 5)  # the least of them: other parts of a server start at the same time

    def prefill(count: int) -> float:
        # The calling thread's CPU time: what it would take if no other process ran. A server's parts start at the same
        # time, and pieces of work as large as these do not depend on how fast a thread wakes.
        runner.threads = threads.ThreadPolicy(count, count)
        return min(1 / measure.prefill_rate(runner, time.thread_time) for _ in range(2))

    counts = threads.candidates(threads.usable_cores())
    policy = threads.ThreadPolicy(threads.choose(counts, decode)[0], threads.choose(counts, prefill)[0])
    report(f"threads: {policy.decode} for decode steps, {policy.prefill} for prefill", None)
    return threads.AdaptiveThreads(counts, policy, lambda text: report(text, None))
