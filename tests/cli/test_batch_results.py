from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagemill.batch_lines import BatchRequest, Reply, result_line
from pagemill.batch_results import Results
from pagemill_shared.errors import ConfigurationError


def row(custom_id: str, status: int = 200) -> bytes:
    return result_line("x", BatchRequest(1, custom_id, "/v1/completions", {}), Reply(status, body={}))


def test_results_are_there_as_soon_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with Results(path) as results:
        assert results.settled == set()
        results.add(row("a"))
        assert path.read_bytes() == row("a")
        results.add(row("b"))
    with Results(path) as results:
        assert results.settled == {"a", "b"}
        results.add(row("c"))
    assert path.read_bytes() == row("a") + row("b") + row("c")


@pytest.mark.parametrize("cut", [1, 10, len(row("b")) - 1])
def test_a_last_line_that_was_cut_is_taken_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out"
    path.write_bytes(row("a") + row("b")[:cut])
    path.chmod(0o640)
    with Results(path) as results:
        assert results.settled == {"a"}
        results.add(row("b"))
    assert path.read_bytes() == row("a") + row("b")
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["out"]


def test_results_that_another_run_may_better_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(row("a", 503) + row("b") + row("c", 0) + row("d", 400))
    with Results(path) as results:
        assert results.settled == {"b", "d"}
    assert path.read_bytes() == row("b") + row("d", 400)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(row("a") + b"my diary\n" + row("b")[:5])
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="out, line 2: not a result of a batch"):
        Results(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", row("a", 503)])
def test_two_runs_cannot_write_to_one_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with Results(path), pytest.raises(ConfigurationError, match="another run writes to it"):
        Results(path)
    with Results(path):
        pass


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        Results(tmp_path / "no" / "out")
    with pytest.raises(ConfigurationError, match="not a file"):
        Results(Path("/dev/zero"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    with Results(tmp_path / "out") as results:
        results._file.close()
        results._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
        with pytest.raises(ConfigurationError, match="No space left"):
            results.add(row("a"))
