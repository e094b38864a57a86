"""Frames into the broker's shell and core: whatever they are, only documented answers come out.

Frames go through the same decoding as on a socket, without one; the integrity check runs after each.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker import protocol as p
from broker.errors import BY_CODE, ProtocolError
from broker.logs import Log
from broker.scheduler import Scheduler
from broker.settings import BrokerSettings

IDS = st.sampled_from(["a", "b", "life-1-1.1", "life-1-2.1", "", "x" * 64, "x" * 65, "\n", "ä", "\0"])
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
TYPES = st.sampled_from(
    [
        "submit",
        "cancel",
        "ping",
        "models",
        "chunk",
        "done",
        "error",
        "ready",
        "beat",
        "handoff",
        "leave",
        "work",
        "x",
    ]
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "id": IDS,
    "ids": st.lists(IDS, max_size=4),
    "pending": st.lists(IDS, max_size=4),
    "tokens": st.lists(st.integers(0, 9), max_size=4),
    "model": st.sampled_from(["", "m", "n"]),
    "stream": st.booleans(),
    "priority": st.integers(-1, 10),
    "deadline_ms": st.integers(0, 2**43),
    "cost": st.integers(-1, 2**63),
    "prefix": st.lists(st.integers(0, 9), max_size=3),
    "version": st.sampled_from([1, 1, 1, 2, -1]),
    "name": st.sampled_from(["gpu0", "gpu1"]),
    "slots": st.integers(-1, 5),
    "session": st.text(max_size=8),
    "steps": st.integers(0, 2**63),
    "code": st.sampled_from([*BY_CODE, "made_up"]),
    "message": st.text(max_size=8),
    "tenant": st.text(max_size=3),
    "device": st.text(max_size=3),
    "host": st.text(max_size=3),
    "pid": st.integers(0, 9),
    "models": st.just([{"name": "m", "context": 1, "vocab": 1}]),
}
REQUIRED = {  # what makes a header of this type whole; the rest is drawn at will
    "submit": ["id"],
    "cancel": ["id"],
    "chunk": ["ids"],
    "done": ["id"],
    "error": ["id", "code", "message"],
    "ready": ["name", "device", "host", "pid", "slots", "models"],
    "beat": ["session"],
    "handoff": ["ids"],
}


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A header that is nearly right, or bytes that are nothing."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.binary(max_size=40) | ANY.map(p.encode) | st.just(pickle.dumps({"type": "submit"})))
    kind = draw(TYPES)
    names = {*REQUIRED.get(kind, []), *draw(st.lists(st.sampled_from(sorted(LIKELY)), max_size=6))}
    header: dict[str, Any] = {"type": kind, **{name: draw(LIKELY[name]) for name in sorted(names)}}
    for name in draw(st.lists(st.sampled_from(sorted(names) or ["id"]), max_size=1)):
        if draw(st.booleans()):
            header[name] = draw(ANY)
    return p.encode(header)


FRAMES = st.lists(headers() | st.just(b"") | st.binary(max_size=9), min_size=0, max_size=4)
EVENTS = st.lists(st.tuples(st.sampled_from(["c1", "c2", "w1", "w2"]), FRAMES), min_size=1, max_size=25)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(EVENTS)
def test_any_frames_leave_the_broker_whole_and_get_documented_answers(
    events: list[tuple[str, list[bytes]]],
) -> None:
    log = io.StringIO()
    scheduler = Scheduler(BrokerSettings(), "life-1", 0.0, Log("broker", stream=log))
    now = 0.0
    for peer, frames in events:
        now += 0.1
        deliver(scheduler, peer, frames, now)
        scheduler.tick(now)
        scheduler.check()
        for side, _, sent in scheduler.take():
            decoder: Any = p.to_client if side == "client" else p.to_worker
            message = p.decode_header(decoder, p.split(sent)[1])
            assert not isinstance(message, p.Failed) or message.code in BY_CODE
    assert all(line.startswith("{") for line in log.getvalue().splitlines())


def deliver(scheduler: Scheduler, peer: str, frames: list[bytes], now: float) -> None:
    """What `sockets` does with a message."""
    identity = peer.encode()
    try:
        delimited, header, body = p.split(frames)
        if peer.startswith("c"):
            scheduler.on_client(identity, p.decode_header(p.from_client, header), body, delimited, now)
        else:
            scheduler.on_worker(identity, p.decode_header(p.from_worker, header), body, now)
    except ProtocolError as problem:
        scheduler.on_malformed("client" if peer.startswith("c") else "worker", identity, problem)
