"""POST /v1/embeddings: pooled hidden states of a decoder."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np

from pagemill_gateway.embedding_body import EmbeddingBody
from pagemill_gateway.encoding import encode_prompts
from pagemill_gateway.engine import Engine, Generation
from pagemill_gateway.exchange import Exchange
from pagemill_gateway.prompt import Prompt
from pagemill_gateway.streaming import send_whole
from pagemill_shared.sampling import SamplingParams

_NUMBERS = 1024
"""About how many numbers an embedding has, to know whether many of them are written off the event loop."""


async def embeddings(engine: Engine, exchange: Exchange, raw: bytes) -> None:
    arrived = time.monotonic()
    body = await engine.parse(EmbeddingBody, raw)
    prompts = await encode_prompts(engine, body, body.inputs, "input", 0)
    await engine.connection.until_able()
    for prompt in prompts:
        engine.max_tokens(len(prompt), 0, True, "input", "input")
    sampling = SamplingParams(temperature=0.0, max_tokens=0, pooling=body.pool)
    request_id = body.request_id or exchange.request_id
    generation = engine.reading(prompts, sampling, body.priority, request_id, arrived, {"prompt": "input"})
    size = _NUMBERS * 8 * len(prompts)
    await send_whole(engine, exchange, generation, lambda: size, lambda: _answer(engine, generation, body))


def _answer(engine: Engine, generation: Generation, body: EmbeddingBody) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": embedding(request.prompt, body)}
        for index, request in enumerate(generation.requests)
    ]
    tokens = generation.prompt_tokens
    return {
        "object": "list",
        "data": data,
        "model": engine.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def embedding(prompt: Prompt, body: EmbeddingBody) -> list[float] | str:
    """Numbers, or little-endian float32 in base64."""
    vector = prompt.pooled(body.pooling == "mean")
    if body.normalize:
        length = float(np.linalg.norm(vector))
        vector = vector / length if length else vector
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = vector.astype(np.float32).tolist()
    return numbers
