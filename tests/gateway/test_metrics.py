"""/metrics: names, and figures that are of now."""

from __future__ import annotations

import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from prometheus_client.parser import text_string_to_metric_families

from pagemill_gateway.metrics import Histogram
from pagemill_shared.messages import FinishReason

TOKENIZER = byte_level_bpe()


def samples(api: Stage) -> dict[str, float]:
    response = api.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        sample.name + "".join(f"{{{sample.labels[key]}}}" for key in ("finished_reason",) if key in sample.labels): (
            sample.value
        )
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.labels.get("le", "+Inf") == "+Inf"
    }


@pytest.mark.parametrize("prefix", ["pagemill", "vllm"])
def test_the_names_people_know(prefix: str) -> None:
    with stage(metrics_prefix=prefix) as api:
        api.stub.state["metrics"] = {
            "num_requests_running": 3,
            "num_requests_waiting": 2,
            "kv_cache_usage_perc": 0.25,
            "num_preemptions_total": 4,
            "prompt_tokens_total": 50,
            "generation_tokens_total": 60,
            "something_new_total": 7,
            "something_else": 0.5,
        }
        api.stub.replay([*TOKENIZER.encode("one two").ids, 2], FinishReason.EOS)
        api.post("/v1/completions", prompt="x")
        api.stub.replay(TOKENIZER.encode("one two").ids)
        api.post("/v1/completions", prompt="x")
        page = samples(api)
        for name, value in api.stub.state["metrics"].items():
            assert page[f"{prefix}:{name}"] == value
        tokens = 2 * len(TOKENIZER.encode("one two").ids) + 1
        assert page[f"{prefix}:time_to_first_token_seconds_count"] == 2
        assert page[f"{prefix}:inter_token_latency_seconds_count"] == tokens - 2
        assert page[f"{prefix}:e2e_request_latency_seconds_count"] == 2
        assert page[f"{prefix}:request_success_total{{stop}}"] == 1
        assert page[f"{prefix}:request_success_total{{length}}"] == 1
        assert page[f"{prefix}:request_success_total{{abort}}"] == 0
        assert page[f"{prefix}:scheduler_up"] == 1


def test_figures_follow_the_scheduler_and_vanish_with_it() -> None:
    with stage() as api:
        for running in (7, 0):
            api.stub.state["metrics"] = {"num_requests_running": running}
            assert samples(api)["pagemill:num_requests_running"] == running
    with stage(peer_timeout=1.0) as api:  # as long as it is waited for
        api.stub.fall_silent()
        page = samples(api)
        assert page["pagemill:scheduler_up"] == 0
        assert "pagemill:num_requests_running" not in page
        api.stub.speak_again()


def test_aborts_and_errors_are_counted() -> None:
    with stage() as api:
        api.stub.replay([], failure=("internal_error", "broken", ""))
        assert api.post("/v1/completions", prompt="x").status_code == 500
        api.stub.replay([], FinishReason.NOT_FINISHED)
        with api.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}):
            pass
        api.stub.wait_for(lambda: api.stub.aborted)
        page = samples(api)
        assert page["pagemill:request_success_total{error}"] == 1
        assert page["pagemill:request_success_total{abort}"] == 1


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    family = histogram.family("x", "help", {})
    assert [(s.labels.get("le"), s.value) for s in family.samples] == [
        ("1.0", 2), ("2.0", 4), ("+Inf", 5), (None, 5), (None, 14.0),
    ]  # fmt: skip
