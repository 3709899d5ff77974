"""CURVE keys: authentication and encryption of the sockets, in a folder that ``--curve-dir`` names.

server.key             the scheduler's public key, which gateways and workers know it by
server.key_secret      the scheduler's pair
client.key_secret      the pair of gateways and workers
clients/*.key          public keys that the scheduler lets in; add a file to let in another client
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from pagemill_shared.errors import ConfigurationError

ZAP_DOMAIN = "pagemill"
_SERVER_PUBLIC = "server.key"
_SERVER_SECRET = "server.key_secret"
_CLIENT_SECRET = "client.key_secret"
_CLIENTS = "clients"


@dataclass(frozen=True)
class ServerKeys:
    """What the scheduler needs. Keys are Z85 text; the secret one never shows in a log."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: Path


@dataclass(frozen=True)
class ClientKeys:
    """What a gateway or worker needs."""

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)


def generate_keys(folder: Path) -> bool:
    """Makes the keys that ``folder`` lacks; False when there was nothing to do. Secret files are readable by their
    owner alone.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    clients = folder / _CLIENTS
    try:
        clients.mkdir(parents=True, exist_ok=True)
        server_made = _make_pair(folder, "server", folder / _SERVER_PUBLIC, folder / _SERVER_SECRET)
        client_made = _make_pair(folder, "client", clients / "client.key", folder / _CLIENT_SECRET)
    except OSError as error:
        raise ConfigurationError(f"CURVE keys cannot be written to {folder}: {error.strerror or error}") from None
    return server_made or client_made


def _make_pair(folder: Path, name: str, public: Path, secret: Path) -> bool:
    if public.exists() and secret.exists():
        return False
    # Made in a private folder and moved, so that a secret is never readable by others nor seen half written.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
        made_public, made_secret = (Path(path) for path in zmq.auth.create_certificates(scratch, name))
        made_secret.chmod(0o600)
        made_public.chmod(0o644)
        made_secret.replace(secret)
        made_public.replace(public)  # last: a pair without its public file is not complete
    return True


def load_server_keys(folder: Path) -> ServerKeys:
    """The scheduler's keys.

    Raises:
        ConfigurationError: a file is missing, unreadable or not a key, or no client is let in.
    """
    public, secret = _load_pair(folder / _SERVER_SECRET)
    clients = folder / _CLIENTS
    certificates = sorted(clients.glob("*.key"))
    if not certificates:
        raise ConfigurationError(f"{clients} holds no client key (*.key): nobody could connect")
    for certificate in certificates:
        _load_certificate(certificate)
    return ServerKeys(public, secret, clients)


def load_client_keys(folder: Path) -> ClientKeys:
    """A gateway's or worker's keys.

    Raises:
        ConfigurationError: a file is missing, unreadable or not a key.
    """
    server_public, _ = _load_certificate(folder / _SERVER_PUBLIC)
    public, secret = _load_pair(folder / _CLIENT_SECRET)
    return ClientKeys(server_public, public, secret)


@contextmanager
def client_check(context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys | None) -> Iterator[None]:
    """While it lasts, CURVE servers of ``context`` let in the clients of ``keys.clients`` alone."""
    if keys is None:
        yield
        return
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    try:
        authenticator.configure_curve(domain=ZAP_DOMAIN, location=keys.clients)
        yield
    finally:
        authenticator.stop()


def _load_pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load_certificate(path)
    if secret is None:
        raise ConfigurationError(f"{path} holds no secret key")
    return public, secret


def _load_certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except OSError as error:
        reason = error.strerror or "no such file"
        raise ConfigurationError(
            f"CURVE key {path} is not readable: {reason} (`pagemill keys` makes the keys)"
        ) from None
    except (ValueError, IndexError) as error:
        raise ConfigurationError(f"CURVE key {path} is not a certificate: {error}") from None
    if len(public) != 40 or (secret is not None and len(secret) != 40):
        raise ConfigurationError(f"CURVE key {path} is not a certificate: a key has 40 characters")
    return public, secret
