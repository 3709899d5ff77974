"""What tests of whole servers share: the prepared bundled model, and one server that ordinary tests use together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagemill_testing.live_server import ServeCommand
from pagemill_testing.run_files import bundled_cache
from pagemill_testing.sockets import ipc_folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the bundled model and, once a worker has started, its compiled kernels."""
    return bundled_cache(tmp_path_factory)


@pytest.fixture(scope="session")
def shared_server(cache: Path) -> Iterator[ServeCommand]:
    with ipc_folder() as folder:
        server = ServeCommand(
            folder,
            "serve",
            cache_dir=cache,
            num_kv_blocks=512,
            max_num_batched_tokens=256,
            no_worker_timeout=180,
            check_invariants=True,
        )
        try:
            server.until_started()
            yield server
            server.serve.send(signal.SIGTERM)
            assert server.serve.ended() == 0, server.tails()
            left = {path.name for path in folder.iterdir()} - {server.serve.out.name, server.serve.err.name}
            assert left == set()
        finally:
            server.close()


@pytest.fixture
def server(shared_server: ServeCommand) -> Iterator[ServeCommand]:
    """`pagemill serve` with room for everything; ready, and with nothing to do."""
    shared_server.until_ready()
    shared_server.until_idle()
    yield shared_server
    shared_server.drop_all()  # what a failed test has left open
