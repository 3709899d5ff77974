from __future__ import annotations

import hashlib
import os
from collections import namedtuple
from pathlib import Path

import pytest

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.workspace import Workspace


@pytest.fixture
def reports() -> list[tuple[str, float | None]]:
    return []


@pytest.fixture
def space(tmp_path: Path, reports: list[tuple[str, float | None]]) -> Workspace:
    (tmp_path / "made").mkdir()
    return Workspace(tmp_path / "made", lambda what, share: reports.append((what, share)))


def other(tmp_path: Path, name: str) -> Workspace:
    (tmp_path / name).mkdir()
    return Workspace(tmp_path / name, lambda what, share: None)


def test_the_fingerprint_depends_on_names_and_contents_alone(space: Workspace, tmp_path: Path) -> None:
    space.write("a", [b"one", b"two"])
    space.write_json("b.json", {"x": 1, "ü": "é"})
    source = tmp_path / "source"
    source.write_bytes(b'{\n  "x": 1,\n  "\xc3\xbc": "\xc3\xa9"\n}\n')
    same = other(tmp_path, "same")
    same.copy("b.json", source)
    same.write("a", [b"onetwo"])
    linked = other(tmp_path, "linked")
    linked.link("b.json", source)
    linked.write("a", [b"onetwo"])
    assert space.fingerprint() == same.fingerprint() == linked.fingerprint()
    assert len(space.fingerprint()) == len(hashlib.sha256().hexdigest())
    for files in ({"a": b"onetwo"}, {"a": b"onetwo", "c.json": source.read_bytes()}, {"a": b"", "b.json": b""}):
        different = other(tmp_path, "-".join(["different", *files]))
        for name, content in files.items():
            different.write(name, [content])
        assert different.fingerprint() != space.fingerprint()


def test_a_file_is_added_once(space: Workspace) -> None:
    space.write("a", [b"x"])
    with pytest.raises(FileExistsError):
        space.write("a", [b"x"])


def test_links_follow_links_and_copy_nothing(space: Workspace, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "model.safetensors").symlink_to("blob")
    space.link("model.safetensors", tmp_path / "model.safetensors")
    made = space.folder / "model.safetensors"
    assert made.is_symlink()
    assert os.readlink(made) == str(tmp_path / "blob")


def test_without_symbolic_links_a_hard_link_does(
    space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    monkeypatch.setattr(Path, "symlink_to", refuse)
    space.link("w", tmp_path / "blob")
    assert (space.folder / "w").samefile(tmp_path / "blob")
    assert not (space.folder / "w").is_symlink()


def test_without_any_links_a_copy_does(space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    space.link("w", tmp_path / "blob")
    assert (space.folder / "w").read_bytes() == b"weights"
    assert not (space.folder / "w").samefile(tmp_path / "blob")
    assert space.bytes_needed == 7


def refuse(*_: object, **__: object) -> None:
    raise PermissionError("no links here")


def test_space_is_asked_for_before_it_is_used(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9 - 5 * 10**6, 5 * 10**6))
    space.reserve(4_000_000)
    with pytest.raises(ConfigurationError, match=rf"^{space.folder.parent} has 5 MB free; .* needs 2,004 MB$"):
        space.reserve(2_000_000_000)


def test_progress_counts_the_bytes_of_a_step(space: Workspace, reports: list[tuple[str, float | None]]) -> None:
    space.write("before", [b"x" * 100])
    space.begin("working", 1000)
    space.write("a", [b"x" * 10] * 60)
    space.write("b", [b"x" * 10] * 40)
    assert {what for what, _ in reports} == {"working"}
    shares = [share for _, share in reports if share is not None]
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert 10 <= len(shares) <= 30  # often enough to be seen, seldom enough to cost nothing


def test_templates_keep_their_bytes_and_their_place(space: Workspace) -> None:
    space.write_templates({"default": "a\r\nb\n", "tool_use": "é"})
    assert (space.folder / "chat_template.jinja").read_bytes() == b"a\r\nb\n"
    assert (space.folder / "additional_chat_templates" / "tool_use.jinja").read_bytes() == "é".encode()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "x\n"])
def test_a_template_cannot_leave_the_folder(space: Workspace, name: str) -> None:
    with pytest.raises(ConfigurationError, match="chat template with the name"):
        space.write_templates({name: "x"})
    assert list(space.folder.parent.rglob("*.jinja")) == []
