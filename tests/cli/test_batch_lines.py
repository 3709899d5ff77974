from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.batch_lines import BadLine, BatchRequest, Reply, read_requests, result_line, settled_id

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}


def line(**changes: Any) -> bytes:
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value is not None}).encode() + b"\n"


def test_a_request_keeps_its_line_number_and_blank_lines_are_skipped() -> None:
    found = list(read_requests([line(), b"\n", b"  \n", line(custom_id="b", url="/v1/embeddings")]))
    assert found == [
        BatchRequest(1, "a", "/v1/chat/completions", {"messages": []}),
        BatchRequest(4, "b", "/v1/embeddings", {"messages": []}),
    ]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\n", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON: it is nested too deeply"),
        (b"[]\n", "the line: Input should be an object"),
        (line(custom_id=None), "custom_id: Field required"),
        (line(custom_id=""), "custom_id: String should have at least 1"),
        (line(custom_id=7), "custom_id: Input should be a valid string"),
        (line(method="GET"), "method: Input should be 'POST'"),
        (line(url="/metrics"), "url: String should match"),
        (line(url="http://example.org/v1/x"), "url: String should match"),
        (line(url="/v1/../x"), "url: String should match"),
        (line(body="x"), "body: Input should be an object"),
        (line(body={"stream": True}), "body.stream"),
        (line(body={"temperature": math.nan}), "not valid JSON: NaN is no number in JSON"),
        (line(body={"seed": [-math.inf]}), "not valid JSON: -Infinity is no number in JSON"),
        (line(body={"top_p": 0.5}).replace(b"0.5", b"1e999"), "body: top_p: JSON has no infinite number"),
        (line(body={"a": [0.5]}).replace(b"0.5", b"1e999"), "body: JSON has no infinite number"),
        (line(body={"prompt": "\ud800"}), "body: half a surrogate pair is no text"),
        (line(body={"\ud800": 1}), "body: "),
        (line(extra=1), "extra: Extra inputs are not permitted"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(raw: bytes, reason: str) -> None:
    (first, bad) = read_requests([line(custom_id="other"), raw])
    assert isinstance(first, BatchRequest)
    assert isinstance(bad, BadLine)
    assert bad.line == 2
    assert bad.reason.startswith(reason)


def test_too_many_digits_are_told_without_advice_about_the_interpreter() -> None:
    (bad,) = read_requests([b'{"custom_id": ' + b"1" * 5000 + b"}"])
    assert isinstance(bad, BadLine)
    assert "limit (4300 digits)" in bad.reason
    assert "sys." not in bad.reason


def test_an_id_stands_in_one_line_only() -> None:
    assert list(read_requests([line(), line()]))[1] == BadLine(2, "custom_id 'a' stands in line 1 already")


def test_a_result_has_openais_shape() -> None:
    request = BatchRequest(1, "a", "/v1/completions", {})
    row = json.loads(result_line("batch_req_1", request, Reply(200, "r", {"id": "ü\ud800"})))
    assert row == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {"id": "ü?"}},
        "error": None,
    }
    row = json.loads(result_line("batch_req_2", request, Reply(0, failure="ConnectError: gone")))
    assert row["response"] is None
    assert row["error"] == {"code": "no_response", "message": "ConnectError: gone"}


@given(st.text(min_size=1), st.sampled_from([0, 200, 400, 401, 404, 408, 413, 422, 429, 500, 502, 503, 504]))
def test_a_result_is_settled_unless_another_run_may_better_it(custom_id: str, status: int) -> None:
    request = BatchRequest(1, custom_id, "/v1/completions", {})
    raw = result_line("x", request, Reply(status, body={"text": "a\nb\u2028"}))
    assert raw.count(b"\n") == 1
    settled = settled_id(raw)
    assert (settled is None) == (status in (0, 408, 429, 500, 502, 503, 504))
    assert settled in (None, custom_id.encode("utf-8", "replace").decode())


@pytest.mark.parametrize(
    "raw", [b"x", b"[]", b"{}", b'{"custom_id": "a"}', b"\xff", b'{"custom_id": "a", "response": 3}']
)
def test_what_is_no_result_is_told(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        settled_id(raw)
