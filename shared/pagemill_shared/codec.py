"""Strict msgpack encoding of the wire messages.

On the wire a message is one msgpack array ``[tag, version, field, field, …]`` in the order of declaration. Decoding
checks tag, version, field count, types, ranges and sizes, and raises ProtocolError and nothing else.
"""

from __future__ import annotations

import msgpack

from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import WIRE
from pagemill_shared.schema import MAX_MESSAGE_BYTES, Message, unpack_fields


def encode(message: Message) -> bytes:
    """The message as bytes.

    Raises:
        KeyError: the type was never registered.
        ValueError: the encoded message would exceed MAX_MESSAGE_BYTES or an array has the wrong shape.
    """
    tag, layout = WIRE.by_type[type(message)]
    data: bytes = msgpack.packb([tag, WIRE.version, *layout.pack(message)])
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes | memoryview) -> Message:
    """The message that ``data`` holds.

    Raises:
        ProtocolError: anything at all is wrong with the bytes.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    try:
        raw = msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True)
    except Exception as error:  # msgpack raises half a dozen unrelated types, RecursionError among them
        raise ProtocolError(f"not a msgpack message: {type(error).__name__}") from None
    if type(raw) is not list or len(raw) < 2:
        raise ProtocolError("not a message: expected [tag, version, …]")
    tag, version, *rest = raw
    if type(version) is not int or version != WIRE.version:
        raise ProtocolError(f"protocol version {version!r} is not {WIRE.version}")
    if type(tag) is not int or tag not in WIRE.by_tag:
        raise ProtocolError(f"unknown message tag {tag!r}")
    cls, layout = WIRE.by_tag[tag]
    return cls(*unpack_fields(cls, layout, rest))
