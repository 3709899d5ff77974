"""The Compose file passes on every setting that a service knows, and nothing that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pagemill.fields import setting_fields
from pagemill.settings_page import COMMANDS

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
GPU: dict[str, Any] = yaml.safe_load((ROOT / "compose.gpu.yml").read_text(encoding="utf-8"))

# What the image or the file itself settles.
SETTLED = {
    "gateway": {"cache_dir", "host", "port", "model_wait"},  # the init step has prepared the model
    "scheduler": {"allow_insecure_bind"},  # there are keys
    "worker": {"cache_dir", "kernels_dir"},
    "prepare": {"cache_dir"},
}


@pytest.mark.parametrize("service", SETTLED)
def test_a_service_is_given_every_setting_that_it_knows(service: str) -> None:
    known = {field.variable for field in setting_fields(COMMANDS[service]) if field.name not in SETTLED[service]}
    assert set(COMPOSE["services"][service]["environment"]) == known


def test_what_the_gpu_file_adds_is_known() -> None:
    known = {field.variable for field in setting_fields(COMMANDS["worker"])}
    assert set(GPU["services"]["worker"]["environment"]) <= known


def test_only_the_gateway_is_published() -> None:
    published = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    assert published == {"gateway": ["${PAGEMILL_HOST:-127.0.0.1}:${PAGEMILL_PORT:-8000}:8000"]}


def test_no_service_writes_to_its_root_or_has_rights() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "privileged" not in service, name


def test_nothing_stands_in_the_way_of_more_workers() -> None:
    assert not {"container_name", "ports", "hostname"} & set(COMPOSE["services"]["worker"])
