"""docs/protocol.md names every message, field, limit, default and error that the code has."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec
import pytest

from broker import errors, protocol

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "protocol.md").read_text()
MESSAGES: list[type[msgspec.Struct]] = [
    message
    for union in (
        protocol.ClientMessage, protocol.BrokerToClient, protocol.WorkerMessage, protocol.BrokerToWorker,
        protocol.AdminMessage, protocol.AdminAnswer,
    )
    for message in typing.get_args(union)
]  # fmt: skip
BODIES: list[type[msgspec.Struct]] = [
    protocol.ModelInfo, protocol.ChatMessage, protocol.Grammar, protocol.Params, protocol.Request,
    protocol.TokenLogprob, protocol.Chunk, protocol.Usage, protocol.Outcome,
]  # fmt: skip
LIMITS = [name for name in vars(protocol) if name.startswith("MAX_")]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__name__)
def test_every_message_is_named_by_its_type(message: type[msgspec.Struct]) -> None:
    tag = message.__struct_config__.tag
    assert re.search(rf"`{tag}`", PAGE), tag


@pytest.mark.parametrize("struct", [*MESSAGES, *BODIES], ids=lambda m: m.__name__)
def test_every_field_is_named(struct: type[msgspec.Struct]) -> None:
    missing = [field for field in struct.__struct_fields__ if f"`{field}`" not in PAGE]
    assert missing == []


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_is_given_with_its_value(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}`")]
    assert f"{getattr(protocol, name):,}" in row


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_every_error_is_given_with_status_and_advice(code: str) -> None:
    cls = errors.BY_CODE[code]
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{code}`")]
    advice = "yes" if cls.retryable else "no"
    assert f"| {cls.http_status} | {advice} |" in row


@pytest.mark.parametrize(
    ("struct", "heading"),
    [
        (protocol.Submit, "#### `submit`"),
        (protocol.Ready, "#### `ready`"),
        (protocol.Params, "`params`; nil"),
        (protocol.Chunk, "### Chunk"),
    ],
)
def test_defaults_in_a_table_are_the_codes(struct: type[msgspec.Struct], heading: str) -> None:
    table = PAGE[PAGE.index(heading) :].split("\n\n")
    rows = next(block for block in table if block.startswith("| field")).splitlines()[2:]
    said = {row.split("|")[1].strip(" `"): row.split("|")[3].strip(" `") for row in rows}
    for field in msgspec.structs.fields(struct):
        if field.name not in said:
            continue
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory
        if default is msgspec.NODEFAULT:
            assert said[field.name] == "required", field.name
        elif default is None:
            assert said[field.name] == "nil", field.name
        elif isinstance(default, bool):
            assert said[field.name] == str(default).lower(), field.name
        elif isinstance(default, int | float):
            assert float(said[field.name]) == default, field.name


def test_the_times_are_the_codes() -> None:
    assert f"`BEAT_INTERVAL_S` {protocol.BEAT_INTERVAL_S}" in PAGE
    assert f"`LIVENESS_S` {protocol.LIVENESS_S}" in PAGE


def test_the_example_header_is_what_the_code_sends() -> None:
    shown = bytes.fromhex("82 a4 74797065 a6 7375626d6974 a2 6964 a4 6d792d31")
    assert protocol.encode(protocol.Submit(id="my-1")) == shown
    assert "82 a4 74797065 a6 7375626d6974 a2 6964 a4 6d792d31" in PAGE
