"""The endpoints that tell how things are: models, health, readiness, version, metrics, state."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from pagemill_gateway.engine import Engine
from pagemill_gateway.errors import ApiError
from pagemill_gateway.exchange import Exchange
from pagemill_gateway.metrics import CONTENT_TYPE


async def models(engine: Engine, exchange: Exchange, _raw: bytes) -> None:
    await exchange.send_json({"object": "list", "data": [_model(engine)]})


async def model(engine: Engine, exchange: Exchange, _raw: bytes) -> None:
    engine.check_model(exchange.scope["path_params"]["model"])
    await exchange.send_json(_model(engine))


def _model(engine: Engine) -> dict[str, Any]:
    return {
        "id": engine.name,
        "object": "model",
        "created": engine.created,
        "owned_by": "pagemill",
        "root": engine.manifest.name,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }


async def server_version(exchange: Exchange) -> None:
    await exchange.send_json({"version": version("pagemill")})


async def metrics(engine: Engine, exchange: Exchange, _raw: bytes) -> None:
    try:
        scheduler = json.loads(await engine.connection.state()).get("metrics")
    except (ApiError, ValueError):
        scheduler = None  # told as scheduler_up 0
    page = engine.metrics.page(scheduler if isinstance(scheduler, dict) else None)
    await exchange.send_bytes(page, 200, None, [(b"content-type", CONTENT_TYPE)])


async def state(engine: Engine, exchange: Exchange, _raw: bytes) -> None:
    await exchange.send_bytes(await engine.connection.state(), 200, None, [(b"content-type", b"application/json")])
