"""Schedulers that vanish, fall silent, restart or start late, and fleets without a worker, as clients see them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pagemill_testing.gateway_server import FLEET, GatewayServer, stage, stream_error
from pagemill_testing.prepared_models import byte_level_ids as ids
from pagemill_testing.prepared_models import write_prepared_model
from pagemill_testing.raw_client import RawClient
from pagemill_testing.scripts import Script
from pagemill_testing.sockets import PATIENCE, ipc_folder
from pagemill_testing.stub_scheduler import StubScheduler

from pagemill_shared.messages import FinishReason, FleetStatus

PATH = "/v1/completions"


class Restartable:
    """A gateway whose scheduler can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/s"

    def scheduler(self, incarnation: int, fleet: FleetStatus = FLEET) -> StubScheduler:
        return StubScheduler(self.endpoint, fleet, incarnation=incarnation)


@pytest.mark.parametrize("how", ["silence", "restart"])
def test_a_lost_scheduler_ends_streams_and_everything_works_again(how: str) -> None:
    with ipc_folder() as folder:
        write_prepared_model(folder)
        place = Restartable(folder)
        first = place.scheduler(1).__enter__()
        first.script = Script(ids("one two three"), FinishReason.NOT_FINISHED)
        with GatewayServer(folder, place.endpoint, peer_timeout=3.0 if how == "silence" else PATIENCE) as gateway:
            gateway.until("/ready", 200)
            results: list[Any] = []
            streamed = ""
            flowing = threading.Event()  # before its first token a stream is answered as any other request

            def ask() -> None:
                results.append(gateway.client.post(PATH, json={"prompt": "x"}))

            def listen() -> None:
                nonlocal streamed
                with gateway.client.stream("POST", PATH, json={"prompt": "x", "stream": True}) as response:
                    for part in response.iter_text():
                        streamed += part
                        flowing.set()

            threads = [threading.Thread(target=ask), threading.Thread(target=listen)]
            for thread in threads:
                thread.start()
            first.wait_for(lambda: first.running == 2 and flowing.is_set())
            if how == "silence":
                first.fall_silent()
            else:
                first.__exit__()
                second = place.scheduler(2).__enter__()
            for thread in threads:
                thread.join(PATIENCE)
            assert stream_error(streamed)["code"] == "scheduler_lost"
            assert results[0].status_code == 503
            if how == "silence":
                for path in ("/ready", "/health", "/v1/pagemill/state"):
                    response = gateway.client.get(path)
                    assert response.status_code == 503, path
                    assert "scheduler" in response.json()["error"]["message"]
                assert gateway.client.post(PATH, json={"prompt": "x"}).status_code == 503
                assert b"scheduler_up 0.0" in gateway.client.get("/metrics").content
                first.speak_again()
                second = first
            gateway.until("/ready", 200)
            second.wait_for(lambda: not second.running)
            second.script = Script(ids("back"))
            answer = gateway.client.post(PATH, json={"prompt": "x"})
            assert answer.json()["choices"][0]["text"] == "back"
        second.__exit__()


def test_a_dead_scheduler_is_noticed_at_once_and_open_streams_wait_for_it() -> None:
    with ipc_folder() as folder:
        write_prepared_model(folder)
        place = Restartable(folder)
        first = place.scheduler(1).__enter__()
        first.script = Script(ids("one two three"), FinishReason.NOT_FINISHED)
        with GatewayServer(folder, place.endpoint, heartbeat_interval=2, peer_timeout=90) as gateway:
            gateway.until("/ready", 200)
            with RawClient(gateway.port, prompt="x", stream=True) as client:
                client.read_until("three")
                first.__exit__()
                for path in ("/ready", "/health"):
                    answer = gateway.until(path, 503).json()["error"]
                    assert (answer["code"], answer["type"]) == ("scheduler_lost", "service_unavailable_error")
                assert gateway.client.post(PATH, json={"prompt": "x"}).json()["error"]["code"] == "scheduler_lost"
                assert gateway.client.get("/v1/pagemill/state").status_code == 503
                client.socket.setblocking(False)
                with pytest.raises(BlockingIOError):  # the open stream has not been told anything
                    client.socket.recv(1)
                client.socket.settimeout(PATIENCE)
                # One that comes back is spoken to at once, long before the gateway would take it for lost; it knows
                # nothing of the stream, which ends.
                second = place.scheduler(2).__enter__()
                gateway.until("/ready", 200)
                data = client.read_all().decode()
            assert '"code": "scheduler_lost"' in data
            second.script = Script(ids("back"))
            assert gateway.client.post(PATH, json={"prompt": "x"}).json()["choices"][0]["text"] == "back"
        second.__exit__()


def test_a_gateway_finds_a_scheduler_that_starts_later() -> None:
    with ipc_folder() as folder:
        write_prepared_model(folder)
        place = Restartable(folder)
        with GatewayServer(folder, place.endpoint, heartbeat_interval=30, peer_timeout=90) as gateway:
            assert gateway.until("/ready", 503).json()["error"]["code"] in ("scheduler_lost", "model_loading")
            with place.scheduler(1):
                gateway.until("/ready", 200)


def test_requests_wait_for_a_worker_only_as_long_as_they_may() -> None:
    none = FleetStatus(0, 0, 0, "")
    with stage(no_worker_timeout=0.4) as api:
        api.stub.replay(ids("one"))
        api.stub.set_fleet(none)
        api.gateway.until("/ready", 503)
        assert api.client.get("/health").status_code == 503
        response = api.post(PATH, prompt="x")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_worker"
        assert not api.stub.submitted
        api.stub.set_fleet(FLEET)
        api.gateway.until("/ready", 200)
        assert api.post(PATH, prompt="x").status_code == 200


def test_a_request_in_the_gap_is_served_by_the_next_worker() -> None:
    with stage(no_worker_timeout=PATIENCE) as api:
        api.stub.replay(ids("one"))
        api.stub.set_fleet(FleetStatus(0, 0, 0, ""))
        api.gateway.until("/ready", 503)
        result: list[Any] = []
        thread = threading.Thread(target=lambda: result.append(api.post(PATH, prompt="x")))
        thread.start()
        api.gateway.until("/health", 503)
        assert not api.stub.submitted
        api.stub.set_fleet(FLEET)
        thread.join(PATIENCE)
        assert result[0].status_code == 200


def test_workers_with_another_model_are_not_used() -> None:
    with stage() as api:
        api.stub.set_fleet(FleetStatus(1, 2048, 700, "another"))
        response = api.gateway.until("/ready", 503)
        assert "another model" in response.json()["error"]["message"]
        assert api.post(PATH, prompt="x").status_code == 503
