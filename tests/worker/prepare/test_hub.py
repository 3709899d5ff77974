"""Against a local cache, in processes of their own: ``huggingface_hub`` reads its environment when it is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pagemill_testing.tiny_folder import write_folder

from pagemill_shared.manifest import prepared_folder, read_manifest

COMMIT = "a" * 40

PREPARE = """
import sys
from pathlib import Path
from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare import prepare_model
try:
    print(prepare_model(sys.argv[1], Path(sys.argv[2]), lambda what, share: None))
except ConfigurationError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "huggingface"


def cache(home: Path, name: str, commit: str = COMMIT) -> Path:
    """Puts a model into the hub's local cache, as a download leaves it. Returns the snapshot."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    plain = write_folder(home / "plain")
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for file in plain.iterdir():
        blob = repository / "blobs" / f"{file.name}-{commit[:4]}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def prepare(model: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PREPARE, model, str(home.parent / "cache")],
        env={**kept, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_cached_model_is_prepared_offline(home: Path, tmp_path: Path) -> None:
    snapshot = cache(home, "org/tiny")
    result = prepare("org/tiny", home)
    assert result.returncode == 0, result.stderr
    made = Path(result.stdout.strip())
    assert made == prepared_folder(tmp_path / "cache", "org/tiny")
    manifest = read_manifest(made)
    assert (manifest.name, manifest.source, manifest.vocab_size) == ("org/tiny", "org/tiny", 264)
    assert (made / "model.safetensors").samefile(snapshot / "model.safetensors")

    shutil.rmtree(home / "hub" / "models--org--tiny" / "refs")
    again = prepare("org/tiny", home)
    assert again.returncode == 0, "a prepared copy does without the hub"
    assert read_manifest(made) == manifest

    shutil.rmtree(home / "hub")
    gone = prepare("org/tiny", home)
    assert gone.returncode == 1, "but not without the weights that it links to"
    assert "is not (or not whole) in the local cache" in gone.stderr


def test_another_commit_is_prepared_anew(home: Path) -> None:
    cache(home, "org/tiny")
    first = read_manifest(Path(prepare("org/tiny", home).stdout.strip()))
    cache(home, "org/tiny", "b" * 40)
    second = read_manifest(Path(prepare("org/tiny", home).stdout.strip()))
    assert second.source_state != first.source_state
    assert second.fingerprint == first.fingerprint  # the content is the same


def test_offline_and_not_cached_is_one_clear_line(home: Path) -> None:
    result = prepare("org/other", home)
    assert result.returncode == 1
    assert result.stderr == (
        "refused: model 'org/other' is not (or not whole) in the local cache, "
        "and the hub is out of reach or switched off\n"
    )


def test_a_hub_that_cannot_be_reached_is_one_clear_line(home: Path) -> None:
    result = prepare("org/other", home, HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9", NO_PROXY="127.0.0.1")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("refused: model 'org/other' ")


def test_a_snapshot_without_weights_is_refused(home: Path) -> None:
    snapshot = cache(home, "org/tiny")
    (snapshot / "model.safetensors").unlink()
    result = prepare("org/tiny", home)
    assert result.returncode == 1
    assert result.stderr.startswith("refused: model 'org/tiny' ")


@pytest.mark.parametrize(
    "model",
    ["org/../x", "a/b/c", "/nowhere/model", "x.gguf", "no such", "-x", "", "~nobody-of-that-name/x", "x" * 5000],
)
def test_what_is_no_name_on_the_hub_is_not_looked_up(home: Path, model: str) -> None:
    result = prepare(model, home)
    assert result.returncode == 1
    assert "there is no such file or folder, and it is no name on the hub" in result.stderr
