"""The one definition of every setting: command line, environment (``PAGEMILL_…``) and docs all come from it.

Each process takes one class below; a setting that several know is defined in one shared base, so that it is the same
in each. This module only defines and validates; the command line is read in the ``pagemill`` package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagemill"


class CommonSettings(BaseSettings):
    """What every process knows."""

    model_config = SettingsConfigDict(env_prefix="PAGEMILL_", frozen=True, extra="forbid", populate_by_name=True)

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level to log")
    log_format: Literal["console", "json"] = Field(
        "console", description="human-readable lines, or one JSON object a line"
    )


class ModelSettings(BaseSettings):
    """Which model, and where its prepared form is kept."""

    model: str = Field("bundled", description="folder, hub name, .gguf file, or `bundled`")
    cache_dir: Path = Field(
        default_factory=default_cache_dir, description="where prepared models and built kernels are kept"
    )


class ChannelSettings(BaseSettings):
    """How the processes reach each other."""

    frontend: str = Field("tcp://127.0.0.1:5570", description="ZeroMQ endpoint between gateways and the scheduler")
    backend: str = Field("tcp://127.0.0.1:5571", description="ZeroMQ endpoint between workers and the scheduler")
    curve_dir: Path | None = Field(
        None, description="folder with CURVE keys; switches on authentication and encryption"
    )
    allow_insecure_bind: bool = Field(False, description="let the scheduler bind beyond loopback without CURVE keys")
    heartbeat_interval: float = Field(0.5, gt=0, le=60, description="seconds between heartbeats")
    peer_timeout: float = Field(3.0, gt=0, le=600, description="seconds of silence after which a peer is lost")


class GatewaySettings(CommonSettings, ModelSettings, ChannelSettings):
    """The gateway's settings."""

    host: str = Field("127.0.0.1", description="address that the HTTP server binds")
    port: int = Field(8000, ge=0, le=65535, description="port of the HTTP server; 0 takes a free one")
    api_key: str | None = Field(None, description="key that clients must send as a bearer token")
    served_model_name: str | None = Field(None, description="model name that the API answers to")
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="largest request body in bytes")
    shutdown_grace: float = Field(10.0, ge=0, description="seconds that open streams get to finish on shutdown")
    no_worker_timeout: float = Field(
        5.0, ge=0, description="seconds that requests wait when no worker is left, before they fail"
    )
    metrics_prefix: str = Field("pagemill", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$", description="prefix of metric names")


class SchedulerSettings(CommonSettings, ChannelSettings):
    """The scheduler's settings."""

    max_num_seqs: int = Field(256, ge=1, le=65536, description="most sequences that one worker runs at once")
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="most tokens that one iteration computes (prefill chunks included)"
    )
    pipeline_depth: int = Field(2, ge=1, le=2, description="plans in flight per worker")
    check_invariants: bool = Field(False, description="check every invariant of the memory manager after each event")
    no_worker_timeout: float = Field(
        5.0, ge=0, description="seconds that requests wait when no worker is left, before they fail"
    )


class WorkerSettings(CommonSettings, ModelSettings, ChannelSettings):
    """The worker's settings."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="weights and activations")
    max_model_len: int | None = Field(
        None, ge=1, description="longest sequence in tokens; the model's own limit by default"
    )
    block_size: int = Field(16, ge=1, le=1024, description="tokens per block")
    num_kv_blocks: int | None = Field(None, ge=1, description="device blocks; sized from --kv-cache-memory by default")
    kv_cache_memory: float | None = Field(None, gt=0, description="GiB of KV cache; a share of free memory by default")
    num_threads: int | None = Field(None, ge=1, description="CPU threads of the forward pass; measured by default")
    tensor_parallel_size: Literal[1] = Field(1, description="ranks per replica (more than one is not built yet)")
