"""The one definition of every setting: command line, environment (``PAGEMILL_…``) and docs/settings.md follow from it.

Each process takes one class at the end of this file, put together from the groups before it; a setting that several
know stands in one group, so that it is the same in each. This module only defines and validates; the command line is
read in the ``pagemill`` package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "PAGEMILL_"


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagemill"


class SettingsGroup(BaseSettings):
    """Base of all groups. ``group`` is the heading above its settings in ``--help`` and in docs/settings.md.

    An empty environment variable counts as unset, so that compose files can pass on variables that may be missing.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
    )

    group: ClassVar[str] = ""


class CommonSettings(SettingsGroup):
    """What every process knows."""

    group: ClassVar[str] = "Logging"

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level to log")
    log_format: Literal["console", "json"] = Field(
        "console", description="human-readable lines, or one JSON object a line"
    )


class CacheSettings(SettingsGroup):
    """Where prepared models and built kernels are kept."""

    group: ClassVar[str] = "Model"

    cache_dir: Path = Field(
        default_factory=default_cache_dir,
        description="where prepared models and built kernels are kept",
        json_schema_extra={"default_text": "$XDG_CACHE_HOME/pagemill, or ~/.cache/pagemill"},
    )


class ModelSettings(CacheSettings):
    """Which model, and where its prepared form is kept."""

    group: ClassVar[str] = "Model"

    model: str = Field("bundled", min_length=1, description="folder, hub name, .gguf file, or `bundled`")


class LivenessSettings(SettingsGroup):
    """When a peer counts as lost. Must be the same in all processes that talk to each other."""

    group: ClassVar[str] = "Connections"

    heartbeat_interval: float = Field(0.5, gt=0, le=60, description="seconds between heartbeats")
    peer_timeout: float = Field(3.0, gt=0, le=600, description="seconds of silence after which a peer is lost")


class CurveSettings(SettingsGroup):
    """Authentication and encryption between the processes."""

    group: ClassVar[str] = "Connections"

    curve_dir: Path | None = Field(
        None, description="folder with CURVE keys; switches on authentication and encryption"
    )


class FrontendSettings(SettingsGroup):
    """Where gateways meet the scheduler."""

    group: ClassVar[str] = "Connections"

    frontend: str = Field(
        "tcp://127.0.0.1:5570",
        pattern=r"^(tcp|ipc)://.+",
        description="ZeroMQ endpoint between gateways and the scheduler",
    )


class BackendSettings(SettingsGroup):
    """Where workers meet the scheduler."""

    group: ClassVar[str] = "Connections"

    backend: str = Field(
        "tcp://127.0.0.1:5571",
        pattern=r"^(tcp|ipc)://.+",
        description="ZeroMQ endpoint between workers and the scheduler",
    )


class BindSettings(SettingsGroup):
    """The scheduler is the side that binds."""

    group: ClassVar[str] = "Connections"

    allow_insecure_bind: bool = Field(False, description="let the scheduler bind beyond loopback without CURVE keys")


class ShutdownSettings(SettingsGroup):
    """How a process ends when it is told to."""

    group: ClassVar[str] = "Processes"

    shutdown_grace: float = Field(
        10.0, ge=0, le=86_400, description="seconds that running requests get to finish on shutdown"
    )


class FleetSettings(SettingsGroup):
    """What happens while no worker is there."""

    group: ClassVar[str] = "Scheduling"

    no_worker_timeout: float = Field(
        5.0,
        ge=0,
        description="seconds that new requests wait for a worker when the last one has gone, before they get 503",
    )


class KeySettings(SettingsGroup):
    """What the server asks for, and what a client of it brings."""

    group: ClassVar[str] = "HTTP"

    api_key: str | None = Field(
        None, min_length=1, repr=False, description="key that clients must send as a bearer token"
    )


class ClientSettings(SettingsGroup):
    """For commands that talk to a running server."""

    group: ClassVar[str] = "Client"

    url: str = Field(
        "http://127.0.0.1:8000", pattern=r"^https?://.+", description="the server that the command talks to"
    )


class BatchSettings(SettingsGroup):
    """How `pagemill run-batch` sends its requests."""

    group: ClassVar[str] = "Client"

    concurrency: int = Field(16, ge=1, le=4096, description="most requests that are open at once")
    attempts: int = Field(
        8,
        ge=1,
        le=1000,
        description="how often a request is sent while the server says 429 or 503, or cannot be reached",
    )


class HttpSettings(KeySettings):
    """The HTTP side."""

    group: ClassVar[str] = "HTTP"

    host: str = Field("127.0.0.1", min_length=1, description="address that the HTTP server binds")
    port: int = Field(8000, ge=0, le=65535, description="port of the HTTP server; 0 takes a free one")
    api_key_file: Path | None = Field(
        None,
        description="file with more keys: one a line, each with priority=N, rate=N (requests a minute) and name=TEXT "
        "behind it where wanted",
    )
    cors_origins: str | None = Field(
        None,
        min_length=1,
        description="origins whose web pages may use the API, separated by commas; * for all of them",
    )
    max_concurrent_requests: int | None = Field(
        None, ge=1, description="most generations that are open at once; one more gets 429"
    )
    max_waiting_requests: int | None = Field(
        None, ge=1, description="most generations that wait for their first token; one more gets 503"
    )
    request_timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds that a generation may take, waiting included"
    )
    served_model_name: str | None = Field(None, min_length=1, description="model name that the API answers to")
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="largest request body in bytes")
    metrics_prefix: str = Field("pagemill", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$", description="prefix of metric names")


class TextSettings(SettingsGroup):
    """How conversations become prompts."""

    group: ClassVar[str] = "Model"

    chat_template: Path | None = Field(None, description="Jinja file that replaces the model's own chat template")
    trust_request_chat_template: bool = Field(
        False, description="let requests bring a chat template of their own: a program that runs in a sandbox"
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral"] = Field(
        "auto", description="how the model writes function calls; auto goes by its chat template"
    )


class ModelWaitSettings(SettingsGroup):
    """For a gateway that starts beside the process that prepares its model."""

    group: ClassVar[str] = "Model"

    model_wait: float = Field(
        0.0, ge=0, description="seconds to wait for the model to be prepared, answering 503 meanwhile"
    )


class SchedulingSettings(SettingsGroup):
    """How the scheduler fills iterations."""

    group: ClassVar[str] = "Scheduling"

    max_num_seqs: int = Field(256, ge=1, le=65536, description="most sequences that one worker runs at once")
    max_num_batched_tokens: int = Field(
        2048, ge=1, le=4_194_304, description="most tokens that one iteration computes (prefill chunks included)"
    )
    max_prefill_seconds: float = Field(
        0.5,
        ge=0,
        allow_inf_nan=False,
        description="seconds that the prompt tokens of one iteration may take by the worker's measured rate, since its "
        "running streams stand still meanwhile (64 tokens may always be computed); 0 means that only "
        "--max-num-batched-tokens bounds them",
    )
    pipeline_depth: int = Field(2, ge=1, le=2, description="plans in flight per worker")
    preemption_mode: Literal["auto", "swap", "recompute"] = Field(
        "auto", description="what becomes of a preempted request's KV blocks; `auto` takes what costs less"
    )
    enable_prefix_caching: bool = Field(True, description="reuse KV blocks of prompts that begin alike")
    worker_return_timeout: float = Field(
        60.0,
        ge=0,
        description="seconds that open requests wait for a worker when the last one has gone, before they fail; never "
        "less than --no-worker-timeout",
    )
    priority_aging: float = Field(
        0.0, ge=0, description="seconds of waiting that outweigh one step of priority; 0 means that none does"
    )
    check_invariants: bool = Field(False, description="check every invariant of the memory manager after each event")
    compiled_scheduler: bool = Field(
        True, description="run the scheduler compiled where its compiled form was built, and not as plain Python"
    )


class ExecutionSettings(SettingsGroup):
    """Where and how the model runs."""

    group: ClassVar[str] = "Execution and KV cache"

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="weights and activations")
    quantization: Literal["none", "int8", "gguf"] = Field(
        "none",
        description="how matrix products are computed (others than none: on a CPU, in float32); int8: 8-bit weights "
        "with a scale per output, inputs with a scale per token; gguf: a GGUF file's own blocks, inputs with a scale "
        "per 32",
    )
    max_model_len: int | None = Field(
        None, ge=1, le=4_194_304, description="longest sequence in tokens; the model's own limit by default"
    )
    block_size: int = Field(16, ge=1, le=1024, description="tokens per block")
    kv_cache_dtype: Literal["auto", "fp16", "bf16", "int8", "fp8"] = Field(
        "auto",
        description="keys and values in the cache, --dtype by default; int8 and fp8 (e4m3): with a scale per token and "
        "head, inside the block; a GPU has these two for --dtype float16 and bfloat16, beside auto",
    )
    num_kv_blocks: int | None = Field(
        None, ge=1, le=2**31 - 1, description="device blocks; sized from --kv-cache-memory by default"
    )
    kv_cache_memory: float | None = Field(
        None, gt=0, description="GiB of KV cache; a share of the free memory by default"
    )
    num_swap_blocks: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="blocks of host memory for preempted requests; 0 switches swapping off; a quarter of the device "
        "blocks by default",
    )
    cuda_graphs: bool = Field(True, description="on a GPU, record decode steps at start and repeat them as CUDA graphs")
    autotune: bool = Field(
        True,
        description="on a GPU, time a handful of tile sizes for attention at the first start with a model, for some "
        "seconds, and keep the fastest in the cache folder",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="CPU threads of the forward pass; by default what is measured to pay, at start and while it runs",
    )
    kernels_dir: Path | None = Field(
        None,
        description="folder of CPU kernels that were compiled ahead of time; compiled on first use, into the cache "
        "folder, by default",
    )


class GatewaySettings(
    HttpSettings,
    TextSettings,
    FleetSettings,
    ModelWaitSettings,
    ModelSettings,
    FrontendSettings,
    CurveSettings,
    LivenessSettings,
    ShutdownSettings,
    CommonSettings,
):
    """The gateway's settings."""


class SchedulerSettings(
    SchedulingSettings,
    FleetSettings,
    FrontendSettings,
    BackendSettings,
    BindSettings,
    CurveSettings,
    LivenessSettings,
    ShutdownSettings,
    CommonSettings,
):
    """The scheduler's settings."""


class WorkerSettings(
    ExecutionSettings,
    ModelSettings,
    BackendSettings,
    CurveSettings,
    LivenessSettings,
    ShutdownSettings,
    CommonSettings,
):
    """The worker's settings."""


class ChatSettings(ClientSettings, KeySettings):
    """The settings of ``pagemill chat``."""


class RunBatchSettings(BatchSettings, ClientSettings, KeySettings):
    """The settings of ``pagemill run-batch``."""


class PrepareSettings(ModelSettings):
    """The settings of ``pagemill prepare``."""


class ServeSettings(
    HttpSettings,
    TextSettings,
    SchedulingSettings,
    FleetSettings,
    ExecutionSettings,
    ModelSettings,
    LivenessSettings,
    ShutdownSettings,
    CommonSettings,
):
    """The settings of ``pagemill serve``: those of the three processes, save the endpoints, which it chooses itself."""

    group: ClassVar[str] = "Processes"

    workers: int = Field(1, ge=1, le=64, description="worker processes")
