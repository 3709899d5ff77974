from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from pagemill.configuration import ALL_SETTINGS, as_environment, read_settings, refuse_unknown_variables
from pagemill.fields import setting_fields
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.settings import GatewaySettings, SchedulerSettings, ServeSettings, WorkerSettings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests say themselves which variables are set."""
    for field in {field for cls in ALL_SETTINGS for field in setting_fields(cls)}:
        monkeypatch.delenv(field.variable, raising=False)


def test_the_command_line_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_PORT", "9000")
    monkeypatch.setenv("PAGEMILL_HOST", "0.0.0.0")
    settings = read_settings(GatewaySettings, {"port": "9001"})
    assert (settings.port, settings.host, settings.max_body_bytes) == (9001, "0.0.0.0", 8 * 1024 * 1024)


def test_values_of_every_kind_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_DTYPE", "bfloat16")
    monkeypatch.setenv("PAGEMILL_NUM_KV_BLOCKS", "64")
    monkeypatch.setenv("PAGEMILL_KV_CACHE_MEMORY", "0.5")
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("PAGEMILL_CURVE_DIR", "/keys")
    settings = read_settings(WorkerSettings, {})
    assert settings.dtype == "bfloat16"
    assert settings.num_kv_blocks == 64
    assert settings.kv_cache_memory == 0.5
    assert (settings.cache_dir, settings.curve_dir) == (Path("/somewhere"), Path("/keys"))
    monkeypatch.setenv("PAGEMILL_CHECK_INVARIANTS", "true")
    assert read_settings(SchedulerSettings, {}).check_invariants


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_API_KEY", "")
    monkeypatch.setenv("PAGEMILL_PORT", "")
    settings = read_settings(GatewaySettings, {})
    assert (settings.api_key, settings.port) == (None, 8000)


@pytest.mark.parametrize(
    ("cls", "name", "value", "allowed"),
    [
        (GatewaySettings, "port", "65536", "whole number, 0 to 65535"),
        (GatewaySettings, "port", "http", "whole number, 0 to 65535"),
        (GatewaySettings, "port", "1.5", "whole number, 0 to 65535"),
        (WorkerSettings, "kv_cache_memory", "0", "number, more than 0"),
        (WorkerSettings, "kv_cache_memory", "nan", "number, more than 0"),
        (WorkerSettings, "kv_cache_memory", "inf", "number, more than 0"),
        (GatewaySettings, "served_model_name", "", "text, not empty"),
        (GatewaySettings, "frontend", "localhost", "text, matching ^(tcp|ipc)://.+"),
        (WorkerSettings, "dtype", "int4", "auto, float32, float16, bfloat16"),
        (WorkerSettings, "block_size", "0", "whole number, 1 to 1024"),
    ],
)
def test_a_bad_value_is_refused_with_its_flag_and_what_is_allowed(
    cls: type[BaseSettings], name: str, value: str, allowed: str
) -> None:
    message = f"--{name.replace('_', '-')}: '{value}' is not allowed; allowed: {allowed}"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        read_settings(cls, {name: value})


def test_the_model_is_called_what_the_command_line_calls_it() -> None:
    with pytest.raises(ConfigurationError, match=r"^MODEL: '' is not allowed"):
        read_settings(WorkerSettings, {"model": ""})


def test_a_bad_variable_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_LOG_FORMAT", "xml")
    with pytest.raises(
        ConfigurationError, match=r"^PAGEMILL_LOG_FORMAT: 'xml' is not allowed; allowed: console, json$"
    ):
        read_settings(GatewaySettings, {"port": "1"})


def test_all_faults_are_named_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"^--\S+: .* is not allowed; .*; --\S+: .* is not allowed; .*$"):
        read_settings(WorkerSettings, {"dtype": "int4", "device": "tpu"})


def test_a_bad_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings(GatewaySettings, {"api_key": "secret"})
    assert "secret" not in repr(settings)


def test_an_unknown_variable_is_refused_with_the_closest_known_one() -> None:
    with pytest.raises(ConfigurationError, match=r"^PAGEMILL_PROT: no such setting; did you mean PAGEMILL_PORT\?$"):
        refuse_unknown_variables({"PAGEMILL_PROT": "1"})
    with pytest.raises(ConfigurationError, match=r"^PAGEMILL_XYZZY_QQ: no such setting; known are PAGEMILL_\w+, "):
        refuse_unknown_variables({"PAGEMILL_XYZZY_QQ": "1"})


def test_a_variable_that_another_command_knows_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_DTYPE", "float32")
    read_settings(SchedulerSettings, {})


def test_settings_survive_the_way_through_a_childs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_MAX_NUM_SEQS", "7")  # of the parent; the child must not see it
    settings = ServeSettings(check_invariants=True, kv_cache_memory=0.25, api_key="k", max_num_seqs=9, workers=2)
    child = as_environment(settings.model_dump(), {"PATH": "/bin", "PAGEMILL_CURVE_DIR": "/keys"})
    assert child["PATH"] == "/bin"
    assert "PAGEMILL_CURVE_DIR" not in child
    for name, value in child.items():
        monkeypatch.setenv(name, value)
    assert ServeSettings() == settings
