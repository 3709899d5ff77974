from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.folder import private_folder, remove_stale_folders


def test_the_folder_is_private_and_goes_with_its_content(tmp_path: Path) -> None:
    with private_folder(tmp_path) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "frontend").touch()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_goes_when_the_body_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), private_folder(tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_server_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from pagemill.folder import private_folder\n"
        "with private_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'frontend').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-P", "-c", code, tmp_path], check=False)
    (left,) = tmp_path.iterdir()
    with private_folder(tmp_path) as folder:
        assert [folder] == list(tmp_path.iterdir())
        assert folder != left


def test_the_folder_of_a_living_server_and_what_is_not_ours_stay(tmp_path: Path) -> None:
    (tmp_path / "pagemill-file").touch()
    (tmp_path / "pagemill-empty").mkdir()
    (tmp_path / "pagemill-link").symlink_to(tmp_path / "pagemill-empty")
    with private_folder(tmp_path) as folder:
        remove_stale_folders(tmp_path)
        assert folder.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"pagemill-file", "pagemill-empty", "pagemill-link"}


def test_a_long_temporary_folder_gives_way_to_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with private_folder() as folder:
        assert len(f"{folder}/frontend") < 100
