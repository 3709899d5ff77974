"""API keys: files of them, what each may do, and that none shows anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from structlog.testing import capture_logs

from pagemill_gateway.keys import Keys, Rate
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.messages import FinishReason

LINES = """
# everybody's
sk-plain
sk-slow rate=2 name=slow
sk-batch   priority=7
"""
PROMPT = {"prompt": "x", "max_tokens": 1}


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(LINES)
    with stage(api_key="sk-one", api_key_file=file) as running:
        running.stub.replay(byte_level_bpe().encode("!").ids, FinishReason.LENGTH)
        yield running


@pytest.mark.parametrize("key", ["sk-one", "sk-plain", "sk-batch"])
def test_each_key_opens(api: Stage, key: str) -> None:
    assert api.client.get("/v1/models", headers=auth(key)).status_code == 200
    assert api.client.post("/v1/completions", json=PROMPT, headers=auth(key)).status_code == 200


@pytest.mark.parametrize("key", ["sk", "sk-onex", "sk-slow rate=2", "#", "priority=7", "slow"])
def test_nothing_else_does(api: Stage, key: str) -> None:
    with capture_logs() as logs:
        assert api.client.get("/v1/models", headers=auth(key)).status_code == 401
    assert "sk-" not in json.dumps([str(entry) for entry in logs])


def test_a_keys_priority_bounds_that_of_its_requests(api: Stage) -> None:
    api.stub.submitted.clear()
    for key, asked in (("sk-plain", None), ("sk-plain", -3), ("sk-batch", None), ("sk-batch", -3), ("sk-batch", 9)):
        api.client.post("/v1/completions", json=PROMPT | {"priority": asked}, headers=auth(key))
    assert [submit.priority for submit in api.stub.submitted] == [0, -3, 7, 7, 9]


def test_a_key_may_send_so_many_requests_a_minute(api: Stage) -> None:
    for _ in range(2):
        assert api.client.post("/v1/completions", json=PROMPT, headers=auth("sk-slow")).status_code == 200
    response = api.client.post("/tokenize", json={"prompt": "x"}, headers=auth("sk-slow"))
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert api.client.get("/v1/models", headers=auth("sk-slow")).status_code == 200
    assert api.client.post("/v1/completions", json=PROMPT, headers=auth("sk-plain")).status_code == 200


def test_a_rate_refills_with_time() -> None:
    rate = Rate(per_minute=30)
    assert [rate.take(0.0) for _ in range(30)] == [0.0] * 30
    assert rate.take(0.0) == pytest.approx(2.0)
    assert rate.take(1.0) == pytest.approx(1.0)
    assert rate.take(2.0) == 0.0
    assert rate.take(1000.0) == 0.0
    assert [rate.take(1000.0) for _ in range(29)] == [0.0] * 29
    assert rate.take(1000.0) > 0


def test_less_than_one_request_a_minute() -> None:
    rate = Rate(per_minute=0.5)
    assert rate.take(0.0) == 0.0
    assert rate.take(0.0) == pytest.approx(120.0)
    assert rate.take(120.0) == 0.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("sk-s3cret\nsk-s3cret\n", "twice"),
        ("sk-s3cret rate=fast\n", "line 1: option 1"),
        ("\nsk-s3cret priority=1.5\n", "line 2: option 1"),
        ("sk-s3cret name=a sk-other\n", "line 1: option 2"),
        ("sk-s3cret rate=0\n", "more than 0"),
    ],
)
def test_a_broken_file_is_refused_without_telling_its_keys(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        Keys.load(None, file)
    assert "s3cret" not in str(caught.value)
    assert "sk-other" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: FileNotFoundError"):
        Keys.load("x", tmp_path / "none")


def test_keys_show_nowhere() -> None:
    keys = Keys.load("s3cret", None)
    assert "s3cret" not in repr(keys) + repr(keys.find(b"s3cret"))
    assert not Keys.load(None, None)
