"""CURVE keys on disk: made once, private, and one clear line when something is wrong with them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pagemill_shared.curve import generate_keys, load_client_keys, load_server_keys
from pagemill_shared.errors import ConfigurationError


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_keys_are_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert generate_keys(folder) is True
    made = snapshot(folder)
    assert set(made) == {"server.key", "server.key_secret", "client.key_secret", "clients/client.key"}
    assert generate_keys(folder) is False
    assert snapshot(folder) == made


def test_only_what_is_missing_is_made(tmp_path: Path) -> None:
    generate_keys(tmp_path)
    before = snapshot(tmp_path)
    (tmp_path / "client.key_secret").unlink()
    assert generate_keys(tmp_path) is True
    after = snapshot(tmp_path)
    assert after["server.key_secret"] == before["server.key_secret"]
    assert after["clients/client.key"] != before["clients/client.key"]


def test_secret_files_belong_to_their_owner_alone(tmp_path: Path) -> None:
    generate_keys(tmp_path)
    for path in tmp_path.rglob("*.key_secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"secret-key" not in (tmp_path / "server.key").read_bytes()
    assert b"secret-key" not in (tmp_path / "clients" / "client.key").read_bytes()


def test_both_sides_load_what_was_made(tmp_path: Path) -> None:
    generate_keys(tmp_path)
    server, client = load_server_keys(tmp_path), load_client_keys(tmp_path)
    assert client.server_public == server.public
    assert client.public != server.public
    assert {len(key) for key in (server.public, server.secret, client.public, client.secret)} == {40}


def test_secrets_do_not_show(tmp_path: Path) -> None:
    generate_keys(tmp_path)
    server, client = load_server_keys(tmp_path), load_client_keys(tmp_path)
    assert server.secret.decode() not in repr(server)
    assert client.secret.decode() not in repr(client)


def test_missing_keys_are_a_clear_error(tmp_path: Path) -> None:
    for load in (load_server_keys, load_client_keys):
        with pytest.raises(ConfigurationError, match=r"CURVE key .*server\.key\w* is not readable"):
            load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\0garbage", b'public-key = "short"\n', b"public-key\n"])
def test_a_file_that_is_no_key_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    generate_keys(tmp_path)
    (tmp_path / "client.key_secret").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"client\.key_secret is not a certificate"):
        load_client_keys(tmp_path)
    (tmp_path / "clients" / "client.key").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"clients/client\.key is not a certificate"):
        load_server_keys(tmp_path)


def test_a_public_file_in_place_of_the_secret_one_is_a_clear_error(tmp_path: Path) -> None:
    generate_keys(tmp_path)
    (tmp_path / "server.key_secret").write_bytes((tmp_path / "server.key").read_bytes())
    with pytest.raises(ConfigurationError, match="holds no secret key"):
        load_server_keys(tmp_path)


def test_a_scheduler_that_would_let_nobody_in_is_refused(tmp_path: Path) -> None:
    generate_keys(tmp_path)
    (tmp_path / "clients" / "client.key").unlink()
    with pytest.raises(ConfigurationError, match="nobody could connect"):
        load_server_keys(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        generate_keys(tmp_path / "file")
