"""From settings to a runner and its hello, on prepared tiny models and on the bundled one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagemill_testing.cpu_kernels import compiled, isa_names
from pagemill_testing.plan_driver import PlanDriver
from pagemill_testing.shapes_alone import ShapesAlone
from pagemill_testing.tiny_gguf import Kind, TinyGguf
from pagemill_testing.tiny_models import VOCAB, greedy, save, tiny_llama
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from pagemill_kernels.interface import AttentionBatch, Kernels, ResidentKernels
from pagemill_kernels.reference import TorchKernels
from pagemill_shared.codec import decode, encode
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.settings import WorkerSettings
from pagemill_worker import load
from pagemill_worker.cache import KVCache
from pagemill_worker.forward import HostForward, ResidentForward
from pagemill_worker.load import load_worker
from pagemill_worker.models.decoder import DecoderModel
from pagemill_worker.models.registry import load_model
from pagemill_worker.models.weights import weights_bytes

REFERENCE = tiny_llama()


@pytest.fixture(scope="module", autouse=True)
def _compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every test here loads a worker with a new cache directory: none is to compile the kernels anew."""
    library = compiled(isa_names()[0], tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEMILL_KERNELS_DIR", str(library.parent))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"))


def make_source(folder: Path, reference: PreTrainedModel = REFERENCE, **config: Any) -> Path:
    save(reference, folder)
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")).save(str(folder / "tokenizer.json"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def settings(source: Path, tmp_path: Path, **changes: Any) -> WorkerSettings:
    fields = {"model": str(source), "cache_dir": tmp_path, "num_threads": 1, "kv_cache_memory": 0.01}
    return WorkerSettings(**(fields | changes))


class Reports(list[str]):
    def __call__(self, step: str, share: float | None) -> None:
        self.append(step)


def test_a_worker_is_ready_for_plans(source: Path, tmp_path: Path) -> None:
    reports = Reports()
    runner, hello = load_worker(settings(source, tmp_path, block_size=8, num_kv_blocks=40), reports)
    assert decode(encode(hello)) == hello
    assert (hello.num_blocks, hello.block_size, hello.num_swap_blocks, hello.vocab_size) == (40, 8, 10, VOCAB)
    assert hello.block_bytes == 2 * 2 * 8 * 2 * 16 * 4
    assert (hello.max_model_len, hello.dtype) == (256, "float32")
    assert hello.device.startswith("cpu")
    assert hello.kernels.split("+")[0] == f"cpu-{isa_names()[0]}"
    assert hello.prefill_tokens_per_s > 0
    assert hello.swap_bytes_per_s > 0
    assert any("40 blocks, 320 tokens" in report for report in reports)
    assert any("25% of the device blocks" in report and report.endswith(": 10 blocks") for report in reports)
    driver = PlanDriver(runner)
    [sequence] = driver.add([5, 6, 7], 6)
    driver.run()
    assert sequence.outputs == greedy(REFERENCE, [5, 6, 7], 6)


def test_a_model_that_transformers_runs_is_ready_as_well(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
    torch.manual_seed(0)
    reference = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    folder = make_source(tmp_path / "source", reference)
    runner, hello = load_worker(settings(folder, tmp_path, block_size=8, num_kv_blocks=40), Reports())
    assert (hello.vocab_size, hello.max_model_len, hello.block_bytes) == (VOCAB, 128, 2 * 2 * 8 * 4 * 16 * 4)
    assert hello.kernels.startswith(f"cpu-{isa_names()[0]}+")
    driver = PlanDriver(runner)
    [sequence] = driver.add([5, 6, 7], 6)
    driver.run()
    assert sequence.outputs == greedy(reference, [5, 6, 7], 6)


def test_swap_space_is_as_large_as_asked(source: Path, tmp_path: Path) -> None:
    runner, hello = load_worker(settings(source, tmp_path, num_swap_blocks=33), Reports())
    assert (hello.num_swap_blocks, len(runner.cache.host_pool)) == (33, 33)


def test_without_swap_space_no_swapping(source: Path, tmp_path: Path) -> None:
    reports = Reports()
    _, hello = load_worker(settings(source, tmp_path, num_swap_blocks=0), reports)
    assert (hello.num_swap_blocks, hello.swap_bytes_per_s) == (0, 0.0)
    assert decode(encode(hello)) == hello
    assert reports[-1].endswith("no swapping")


def test_workers_have_different_identities_and_the_same_fingerprint(source: Path, tmp_path: Path) -> None:
    hellos = [load_worker(settings(source, tmp_path), Reports())[1] for _ in range(2)]
    assert hellos[0].identity != hellos[1].identity
    assert hellos[0].fingerprint == hellos[1].fingerprint != ""


def test_threads_are_measured_by_default(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    tried: list[int] = []
    monkeypatch.setattr(load.threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", tried.append)  # a test takes one thread
    runner, _ = load_worker(settings(source, tmp_path, num_threads=None), Reports())
    assert {1, 2} <= set(tried)
    assert runner.threads.of(1) in (1, 2)
    assert torch.get_num_threads() == before


def test_explicit_threads_and_lengths(source: Path, tmp_path: Path) -> None:
    runner, hello = load_worker(settings(source, tmp_path, max_model_len=100), Reports())
    assert (runner.threads.of(1), runner.threads.of(1000)) == (1, 1)
    assert hello.max_model_len == runner.max_model_len == 100


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes(dtype: str, source: Path, tmp_path: Path) -> None:
    runner, hello = load_worker(settings(source, tmp_path, dtype=dtype), Reports())
    assert hello.dtype == dtype
    assert runner.cache.pool.dtype == load.DTYPES[dtype]


def test_int8_products_serve_when_asked_for(source: Path, tmp_path: Path) -> None:
    runner, hello = load_worker(settings(source, tmp_path, quantization="int8"), Reports())
    assert hello.kernels == f"cpu-{isa_names()[0]}+int8"
    driver = PlanDriver(runner)
    [alone] = driver.add([5, 6, 7], 6)
    driver.run()
    mates = [driver.add([9 + row, 3], 6)[0] for row in range(3)]
    [again] = driver.add([5, 6, 7], 6)
    driver.run()
    assert again.outputs == alone.outputs  # a row's scales are its own
    assert all(len(mate.outputs) == 6 for mate in mates)


@pytest.mark.parametrize(
    ("name", "entry"),
    [("auto", 16 * 4), ("fp16", 16 * 2), ("bf16", 16 * 2), ("int8", 16 + 4), ("fp8", 16 + 4)],
)
def test_the_cache_is_as_small_as_asked(name: str, entry: int, source: Path, tmp_path: Path) -> None:
    runner, hello = load_worker(
        settings(source, tmp_path, block_size=8, num_kv_blocks=40, kv_cache_dtype=name), Reports()
    )
    assert hello.block_bytes == 2 * 2 * 8 * 2 * entry == runner.cache.pool[0].nbytes
    driver = PlanDriver(runner)
    [sequence] = driver.add([5, 6, 7], 6)
    driver.run()
    assert len(sequence.outputs) == 6
    assert not [name for name in runner.kernels.calls if name.endswith(":torch")]


def test_a_cache_that_the_kernels_do_not_have_is_refused() -> None:
    class OneDtype(TorchKernels):
        name = "other"
        serves_cache = Kernels.serves_cache

    message = "--kv-cache-dtype int8: the other kernels have no such cache for a model in bfloat16; .* auto, bf16$"
    with pytest.raises(ConfigurationError, match=message):
        load._cache_dtype("int8", torch.bfloat16, OneDtype())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q5_1], ids=lambda kind: kind.name)
def test_blocks_of_a_gguf_file_serve_when_asked_for(kind: Kind, tied: bool, tmp_path: Path) -> None:
    file = TinyGguf(kind=kind, tied=tied).write(tmp_path / "tiny.gguf")
    tokens, positions = torch.arange(100, 120), torch.arange(20)
    logits = []
    for quantization in ("none", "gguf"):
        runner, hello = load_worker(settings(file, tmp_path, quantization=quantization), Reports())
        batch = AttentionBatch(torch.tensor([0, 20]), torch.tensor([20]), torch.tensor([[1, 2]]), positions + 16, 0)
        step = runner.kernels.prepare(batch, runner.cache.pool)
        hidden = runner.model.forward(tokens, positions, runner.cache.pool, runner.kernels, step)
        logits.append(runner.model.logits(hidden))
    assert hello.kernels == f"cpu-{isa_names()[0]}+gguf"
    exact, blocks = logits
    error = float((blocks - exact).norm() / exact.norm())
    assert 0 < error < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "gguf"}, "--quantization gguf needs a model from a GGUF file"),
        ({"quantization": "gguf", "dtype": "bfloat16"}, "--quantization gguf: .* no gguf product for bfloat16"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "--quantization int8: .* no int8 product for bfloat16"),
        ({"max_model_len": 257}, "--max-model-len 257 is more than the 256 tokens"),
        ({"num_kv_blocks": 2**31 - 1}, r"GiB \(--num-kv-blocks: 2147483647 blocks .* does not fit into"),
        ({"kv_cache_memory": 1e6}, "does not fit"),
        ({"num_swap_blocks": 2**31 - 1}, r"GiB \(--num-swap-blocks 2147483647, blocks of .* free host memory"),
        ({"kv_cache_memory": 1e-9}, "do not hold one block"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(ConfigurationError, match=message):
        load_worker(settings(source, tmp_path, **changes), Reports())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["OtherForCausalLM"]},
            "Other.* is not supported: it is not among .*; supported are LlamaForCausalLM",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised by 'awq' are not supported"),
    ],
)
def test_unsupported_models_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = make_source(tmp_path / "model", **config)
    with pytest.raises(ConfigurationError, match=message):
        load_worker(settings(model, tmp_path / "cache"), Reports())


OUT_OF_MEMORY = [MemoryError(), torch.OutOfMemoryError("x"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_weights_that_do_not_fit_are_refused(
    error: Exception, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise error

    monkeypatch.setattr(load, "load_model", too_large)
    with pytest.raises(ConfigurationError, match=r"the weights of .* GiB as float32.*\) do not fit into \d+\.\d+ GiB"):
        load_worker(settings(source, tmp_path), Reports())


def test_matrices_in_16_bits_are_counted_so_where_they_stay_so(tmp_path: Path) -> None:
    model = tiny_llama().to(torch.bfloat16)
    folder = save(model, tmp_path)
    parameters = dict(model.named_parameters())
    halves = sum(p.numel() for name, p in parameters.items() if p.dim() == 2 and "embed" not in name)
    elements = sum(p.numel() for p in parameters.values())
    assert weights_bytes(folder, torch.float32) == 4 * elements
    assert weights_bytes(folder, torch.float32, True) == 4 * elements - 2 * halves
    assert weights_bytes(save(tiny_llama(), tmp_path), torch.float32, True) == 4 * elements


@pytest.mark.parametrize(("quantization", "asked"), [("none", 4), ("int8", 1)])
def test_weights_that_cannot_fit_are_not_read(
    quantization: str, asked: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = sum(parameter.numel() for parameter in REFERENCE.parameters())
    monkeypatch.setattr(load.memory, "free_memory", lambda device: asked * elements - 1)
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("was read"))
    with pytest.raises(ConfigurationError, match=f"--quantization {quantization}. do not fit into 0.00 GiB"):
        load_worker(settings(source, tmp_path, quantization=quantization), Reports())


def test_sampling_settings_reach_the_sampler(source: Path, tmp_path: Path) -> None:
    runner, _ = load_worker(settings(source, tmp_path), Reports())
    driver = PlanDriver(runner)
    [sequence] = driver.add([5, 6, 7], 3, SamplingParams(temperature=0.0, logprobs=2))
    driver.run()
    assert all(result.logprobs.counts.tolist() == [3] for result in driver.results)
    assert np.isfinite([result.logprobs.values for result in driver.results]).all()
    assert sequence.done


@pytest.mark.parametrize(
    ("device", "kernels", "cuda_graphs", "expected"),
    [
        ("cpu", ShapesAlone, True, "host"),
        ("cuda", TorchKernels, True, "host"),
        ("cuda", ShapesAlone, True, "resident, recorded"),
        ("cuda", ShapesAlone, False, "resident"),
    ],
)
def test_how_iterations_are_computed_follows_from_device_and_kernels(
    device: str, kernels: type[ResidentKernels[Any]], cuda_graphs: bool, expected: str, source: Path, tmp_path: Path
) -> None:
    chosen = settings(source, tmp_path, cuda_graphs=cuda_graphs)
    config = json.loads((source / "config.json").read_text())
    model = load_model(source, config, 64, torch.float32, torch.device("meta"), TorchKernels())
    cache = KVCache(model.cache, 4, 2, 0, torch.float32, torch.device("meta"))
    forward = load._forward(chosen, model, cache, kernels(), torch.device(device), 64)
    if isinstance(forward, ResidentForward):
        assert expected == ("resident, recorded" if forward.recorder is not None else "resident")
    else:
        assert isinstance(forward, HostForward)
        assert expected == "host"


@pytest.mark.parametrize(("device", "autotune", "times"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)])
def test_kernels_are_tuned_on_a_gpu_unless_that_is_off(
    device: str, autotune: bool, times: int, source: Path, tmp_path: Path
) -> None:
    class Tuned(ShapesAlone):
        def tune(self, cache: torch.Tensor, num_heads: int, dtype: torch.dtype, folder: Path, report: Any) -> None:
            assert cache is pool.pool
            assert (num_heads, dtype, folder) == (model.config.num_heads, torch.bfloat16, tmp_path)
            report("tuned")

    chosen = settings(source, tmp_path, autotune=autotune)
    config = json.loads((source / "config.json").read_text())
    model = load_model(source, config, 64, torch.float32, torch.device("meta"), TorchKernels())
    assert isinstance(model, DecoderModel)
    pool = KVCache(model.cache, 4, 2, 0, torch.float32, torch.device("meta"))
    reports = Reports()
    load._tune(chosen, model, pool, Tuned(), torch.device(device), torch.bfloat16, reports)
    assert reports == ["tuned"] * times
