"""What `scripts/gpu_check.sh` does, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from gpu_check import __main__ as command  # noqa: E402
from gpu_check import correctness, kernels, peer, server, shapes, step  # noqa: E402
from gpu_check.table import Row, as_json, table  # noqa: E402

from pagemill_kernels.reference import TorchKernels  # noqa: E402
from pagemill_worker.graphs import run_again  # noqa: E402

CPU = torch.device("cpu")
TINY = shapes.Shape("tiny", 200, 64, 96, 2, 4, 2, 16, tied=True, max_model_len=256)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    run = subprocess.run([ROOT / "scripts" / "gpu_check.sh"], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (command.NO_GPU, "")
    assert run.stderr.splitlines() == ["no GPU here: torch finds no CUDA device"]


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.parse([]).only == list(command.SECTIONS)
    options = command.parse(["--only", "step,server", "--json", "--quick"])
    assert (options.only, options.json, options.quick) == (["step", "server"], True, True)
    for wrong in ("--only=speed", "--only="):
        with pytest.raises(SystemExit):
            command.parse([wrong])
        assert "--only knows correctness, kernels, step, server, peer, not" in capsys.readouterr().err


def test_model_shapes() -> None:
    large, small = shapes.LLAMA_8B, shapes.LLAMA_1B
    assert large.num_parameters == 8_030_261_248  # as transformers counts meta-llama/Llama-3.1-8B
    assert small.num_parameters == 1_235_814_400
    assert large.token_bytes == 128 * 1024
    assert small.step_weight_bytes == 2 * small.num_parameters
    assert large.step_weight_bytes == 2 * (large.num_parameters - 128_256 * 4096)
    assert large.step_bytes(64, 1024) - large.step_bytes(0, 0) == 64 * 1024 * 128 * 1024


def test_counts_of_bytes_and_operations() -> None:
    assert kernels.chunk_operations(1, 10) == 4 * kernels.HEADS * kernels.HEAD_DIM * 10
    assert kernels.chunk_operations(10, 10) == 4 * kernels.HEADS * kernels.HEAD_DIM * 55
    assert kernels.decode_bytes(2, 1000) > 2 * 1000 * 4096
    saved = kernels.decode_bytes(2, 1000) - kernels.decode_bytes(2, 1000, torch.float8_e4m3fn)
    assert saved == 2 * 1000 * 2 * kernels.KV_HEADS * (kernels.HEAD_DIM - 4)  # a number's second byte, less the scale
    batch = kernels.even_batch(3, 40, 7)
    assert batch.query_starts.tolist() == [0, 7, 14, 21]
    assert batch.num_decodes == 0
    assert sorted(batch.block_tables.flatten().tolist()) == list(range(1, 10))
    assert batch.slot_mapping[6] == batch.block_tables[0, 39 // 16] * 16 + 39 % 16


def test_decode_steps_of_a_model_with_random_weights() -> None:
    loaded = step.load(TINY, 3, 40, 10, CPU, TorchKernels())
    eager, recorded = loaded.runner(None), loaded.runner(lambda: run_again)
    assert step.run_steps(eager, 3, 40, 10) > 0
    assert loaded.kernels.calls["attention"] == 10 * TINY.num_layers
    assert step.run_steps(recorded, 3, 40, 10) > 0
    with torch.inference_mode():
        assert recorded.forward.graphs.recorded(4)().shape == (4, TINY.hidden_size)  # type: ignore[attr-defined]


def test_random_weights_have_the_names_and_shapes_asked_for() -> None:
    with pytest.raises(ValueError, match=r"model\.norm\.weight is asked for as \(3,\), and is \(64,\)"):
        shapes.RandomWeights(TINY, CPU).take("model.norm.weight", (3,))


def test_test_programs_run(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    passed, said = correctness.run("triton_blocks", environment)
    assert passed is not None, said
    assert passed >= 15


def test_server_end_to_end() -> None:
    flags = ("--num-kv-blocks", "300", "--max-model-len", "64", "--num-threads", "1")
    rows = list(server.measure(CPU, quick=True, shape=TINY, flags=flags))
    assert [(row.check, row.unit) for row in rows] == [
        ("server, until ready", "s"),
        ("server, output", "tokens/s"),
        ("server, output", "tokens/s"),
    ]
    assert all(row.value and row.value > 0 for row in rows)


def test_peer(tmp_path: Path) -> None:
    model = shapes.write_folder(TINY, tmp_path, CPU)
    [row] = peer.throughputs(model, CPU, [("three", server.made_up(3, 9, TINY.vocab_size), 4)])
    assert (row.case, row.unit) == ("three", "tokens/s")
    assert row.value


def test_table() -> None:
    rows = [
        Row("copy", "4 GiB", 4321.0, "GB/s"),
        Row("decode", "64 x 1024", 0.98765, "ms", 0.71, 0.75),
        Row("step", "with graphs", None, "n/a", note="none"),
        Row("server", "", None, "", note="OSError: no"),
    ]
    assert table(rows).splitlines() == [
        "| check  | case        | value      | of the floor | aim | note        |",
        "|--------|-------------|------------|--------------|-----|-------------|",
        "| copy   | 4 GiB       | 4,321 GB/s |              |     |             |",
        "| decode | 64 x 1024   | 0.988 ms   | 71%          | 75% |             |",
        "| step   | with graphs | n/a        |              |     | none        |",
        "| server |             | FAILED     |              |     | OSError: no |",
    ]
    assert [row.has_failed for row in rows] == [False, False, False, True]
    assert json.loads(as_json("a GPU", rows))["rows"][1]["share"] == 0.71
