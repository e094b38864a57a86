"""The protocol's types refuse what the document forbids, and say which field."""

from __future__ import annotations

import msgpack
import msgspec
import pytest

from broker import protocol
from broker.errors import InvalidRequest, ProtocolError

BOMBS = {
    "array of 2^31": bytes.fromhex("dd7fffffff"),
    "map of 2^32": bytes.fromhex("dfffffffff"),
    "nested claims": bytes.fromhex("9ffd74f7dd74fffdbd"),
    "deep arrays": b"\x91" * 100_000,
    "deep arrays in a field": b"\x83\xa4type\xa6submit\xa2id\xa1x\xa1z" + b"\x91" * 100_000 + b"\xc0",
    "trailing byte": protocol.encode(protocol.Submit(id="a")) + b"\x00",
    "integer key": b"\x81\x01\x02",
    "array key": b"\x81\x91\x01\x02",
    "ext type": b"\xc7\x01\x05a",
    "not UTF-8": b"\x82\xa4type\xa6submit\xa2id\xa1\xff",
    "empty": b"",
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_c75_a_header_that_is_no_message_is_a_protocol_error(name: str) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_header(protocol.from_client, BOMBS[name])


@pytest.mark.parametrize("name", BOMBS)
def test_c75_a_body_that_is_no_request_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        protocol.decode_request(BOMBS[name])


def test_header_longer_than_the_limit_is_not_even_decoded() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        protocol.decode_header(protocol.from_client, b"\xc1" * (protocol.MAX_HEADER_BYTES + 1))


@pytest.mark.parametrize("bad", ["", "x" * 65, "with space", "new\nline", "naïve", "tab\t"])
def test_ids_are_short_printable_and_have_no_spaces(bad: str) -> None:
    frame = msgpack.packb({"type": "submit", "id": bad})
    with pytest.raises(ProtocolError):
        protocol.decode_header(protocol.from_client, frame)


def test_a_field_from_the_future_is_ignored_in_headers() -> None:
    frame = msgpack.packb({"type": "submit", "id": "a", "colour": "blue"})
    message = protocol.decode_header(protocol.from_client, frame)
    assert message == protocol.Submit(id="a")


def test_a_message_for_the_other_direction_is_refused() -> None:
    frame = protocol.encode(protocol.Done(id="a"))
    with pytest.raises(ProtocolError):
        protocol.decode_header(protocol.from_client, frame)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"max_tokens": -223}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_c10_a_parameter_out_of_range_is_named(params: dict[str, object], field: str) -> None:
    body = msgpack.packb({"prompt": "hi", "params": params})
    with pytest.raises(InvalidRequest) as caught:
        protocol.decode_request(body)
    assert caught.value.param == field
    assert field.split("[")[0] in caught.value.message


def test_plain_msgpack_and_the_structs_agree_on_the_wire() -> None:
    header = protocol.encode(protocol.Submit(id="a", stream=True, prefix=[1, 2]))
    assert msgpack.unpackb(header) == {"type": "submit", "id": "a", "stream": True, "prefix": [1, 2]}
    bias = protocol.Params(logit_bias=[(5, 1.5)])
    body = protocol.encode(protocol.Request(token_ids=[1], params=bias))
    assert msgpack.unpackb(body) == {"token_ids": [1], "params": {"logit_bias": [[5, 1.5]]}}


def test_split_answers_whether_there_was_a_delimiter() -> None:
    assert protocol.split([b"", b"h", b"b"]) == (True, b"h", [b"b"])
    assert protocol.split([b"h"]) == (False, b"h", [])


@pytest.mark.parametrize("frames", [[], [b""]])
def test_a_message_without_header_is_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        protocol.split(frames)


def test_merged_chunks_say_what_the_single_ones_said() -> None:
    one = protocol.TokenLogprob(1, "a", -0.5)
    two = protocol.TokenLogprob(2, "b", -0.25)
    parts = [
        protocol.Chunk(0, [1], "a", [one], prompt_text="p"),
        protocol.Chunk(1, [], ""),
        protocol.Chunk(1, [2], "b", [two]),
    ]
    assert protocol.merge(parts) == protocol.Chunk(0, [1, 2], "ab", [one, two], prompt_text="p")
    assert parts[0] == protocol.Chunk(0, [1], "a", [one], prompt_text="p"), "the parts stay as they were"


def test_merge_refuses_a_gap() -> None:
    with pytest.raises(ValueError, match="1 was due"):
        protocol.merge([protocol.Chunk(0, [1]), protocol.Chunk(2, [3])])


def test_a_failure_carries_its_exception_over_the_wire() -> None:
    problem = InvalidRequest("top_p: too large", param="top_p")
    frame = protocol.encode(protocol.Failed.of(problem, "a"))
    back = protocol.decode_header(protocol.to_client, frame)
    assert isinstance(back, protocol.Failed)
    assert type(back.exception()) is InvalidRequest
    assert back.exception().param == "top_p"


def test_message_parts_are_joined_in_order() -> None:
    body = msgpack.packb(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    )
    assert msgspec.msgpack.decode(body, type=protocol.ChatMessage).text == "ab"
