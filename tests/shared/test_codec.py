"""Encode then decode is the identity; anything else is a ProtocolError and nothing else."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill_testing.wire import messages

from pagemill_shared.codec import decode, encode
from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import WIRE, Heartbeat, IterationPlan, StateReport, SubmitRequest
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import MAX_MESSAGE_BYTES, Message

ALL = pytest.mark.parametrize("cls", WIRE.types(), ids=lambda cls: cls.__name__)


def decode_or_refuse(data: bytes) -> None:
    """Bytes are either a message, and then one that survives the trip, or a ProtocolError."""
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert decode(encode(message)) == message


@ALL
@settings(deadline=None)
@given(data=st.data())
def test_encode_then_decode_is_identity(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(cls))
    assert decode(encode(message)) == message


def test_decoded_arrays_are_int32_whatever_was_given() -> None:
    message = SubmitRequest(1, 1, 1, "r", np.array([1, 2, 3], np.int64), SamplingParams())  # type: ignore[arg-type]
    decoded = decode(encode(message))
    assert isinstance(decoded, SubmitRequest)
    assert decoded.prompt_token_ids.dtype == np.int32
    assert decoded.prompt_token_ids.tolist() == [1, 2, 3]


@settings(deadline=None)
@given(messages(), st.data())
def test_truncated_bytes_are_refused(message: Message, data: st.DataObject) -> None:
    encoded = encode(message)
    with pytest.raises(ProtocolError):
        decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@settings(deadline=None)
@given(messages(), st.binary(min_size=1, max_size=8))
def test_trailing_bytes_are_refused(message: Message, tail: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(message) + tail)


@settings(deadline=None)
@given(messages(), st.data())
def test_mutated_bytes_raise_nothing_but_protocol_errors(message: Message, data: st.DataObject) -> None:
    encoded = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        match data.draw(st.sampled_from(["replace", "insert", "cut"])):
            case "replace":
                encoded[at] = data.draw(st.integers(0, 255))
            case "insert":
                encoded[at:at] = data.draw(st.binary(min_size=1, max_size=6))
            case _ if len(encoded) > 1:
                del encoded[at]
    decode_or_refuse(bytes(encoded))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(messages(), ANYTHING, st.data())
def test_a_wrong_value_in_any_field_raises_nothing_but_protocol_errors(
    message: Message, value: object, data: st.DataObject
) -> None:
    raw = msgpack.unpackb(encode(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] = value
    decode_or_refuse(msgpack.packb(raw))


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_random_bytes_raise_nothing_but_protocol_errors(data: bytes) -> None:
    decode_or_refuse(data)


@ALL
def test_missing_and_surplus_fields_are_refused(cls: type[Message]) -> None:
    tag, layout = WIRE.by_type[cls]
    for count in (len(layout.fields) - 1, len(layout.fields) + 1):
        if count >= 0:
            with pytest.raises(ProtocolError, match=f"{cls.__name__} has {len(layout.fields)} fields, got {count}"):
                decode(msgpack.packb([tag, WIRE.version, *[None] * count]))


class Marker:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_never_loaded(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(ProtocolError):
        decode(pickle.dumps(Marker(marker), protocol))
    assert not marker.exists()


HOSTILE = {
    "nothing": b"",
    "nested lists": b"\x91" * 100_000 + b"\xc0",
    "nested maps": b"\x81\xc0" * 100_000 + b"\xc0",
    "nested list in a field": msgpack.packb([1, 1])[:1] + b"\x01\x01" + b"\x91" * 50_000,
    "list that claims 4 G items": b"\xdd\xff\xff\xff\xff",
    "map that claims 4 G items": b"\xdf\xff\xff\xff\xff",
    "bytes that claim 4 GB": b"\xc6\xff\xff\xff\xff",
    "text that claims 4 GB": b"\xdb\xff\xff\xff\xff",
    "extension that claims 4 GB": b"\xc9\xff\xff\xff\xff\x01",
    "extension type": b"\x93\x01\x01\xd4\x05\x00",
    "timestamp": b"\x95\x01\x01" + b"\xd6\xff\x00\x00\x00\x01" * 3,
    "not UTF-8": b"\x94\x02\x01\x01\xa2\xff\xfe",
    "reserved byte": b"\xc1",
    "map": msgpack.packb({"tag": 1}),
    "map with a list as key": b"\x81\x91\x01\x01",
    "tag is a boolean": msgpack.packb([True, 1, 1, 0, 0]),
    "tag is unhashable": msgpack.packb([[], 1]),
    "version is a boolean": msgpack.packb([1, True, 1, 0, 0]),
    "version is unhashable": msgpack.packb([1, {}]),
    "another version": msgpack.packb([1, WIRE.version + 1, 1, 0, 0]),
    "unknown tag": msgpack.packb([2**63, WIRE.version]),
    "two messages": encode(Heartbeat(1, 0, 0)) * 2,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_too_large_a_message_is_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        encode(StateReport(1, bytes(MAX_MESSAGE_BYTES)))
    with pytest.raises(ProtocolError, match="exceeds"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_an_error_names_message_and_field() -> None:
    raw = msgpack.unpackb(encode(IterationPlan(1, 1)))
    raw[2 + 5] = b"\0" * 9  # new_blocks
    with pytest.raises(ProtocolError, match=r"IterationPlan\.\w+: 9 bytes do not hold rows"):
        decode(msgpack.packb(raw))
