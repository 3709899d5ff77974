"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from functools import partial

from pydantic_core import from_json

from pagemill_gateway.chat import encode_conversation
from pagemill_gateway.engine import Engine
from pagemill_gateway.exchange import Exchange
from pagemill_gateway.token_bodies import DetokenizeBody, TokenizeChatBody, TokenizeTextBody


async def tokenize(engine: Engine, exchange: Exchange, raw: bytes) -> None:
    body: TokenizeChatBody | TokenizeTextBody
    if _has_messages(raw):
        body = await engine.parse(TokenizeChatBody, raw)
        ids = await encode_conversation(engine, body)
    else:
        body = await engine.parse(TokenizeTextBody, raw)
        encode = partial(engine.tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens)
        ids = await engine.sized(len(body.prompt), encode)
    strings = [engine.tokenizer.token_string(i) for i in ids] if body.return_token_strs else None
    await exchange.send_json(
        {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": strings}
    )


async def detokenize(engine: Engine, exchange: Exchange, raw: bytes) -> None:
    body = await engine.parse(DetokenizeBody, raw)
    engine.check_ids(body.tokens, "tokens")
    text = await engine.sized(len(body.tokens), lambda: engine.tokenizer.decode(body.tokens))
    await exchange.send_json({"prompt": text})


def _has_messages(raw: bytes) -> bool:
    try:
        data = from_json(raw)
    except ValueError:
        return False  # parse_body says what is wrong with it
    return isinstance(data, dict) and data.get("messages") is not None
