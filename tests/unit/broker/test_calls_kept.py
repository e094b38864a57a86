"""What a call keeps of a long stream: little memory, few frames, nothing lost."""

from __future__ import annotations

import pytest

from broker import protocol as p
from broker.calls import MERGED, Calls, encode_request, make_submit
from broker.errors import InvalidRequest


class Silent:
    """Hears and forgets."""

    def on_chunk(self, chunk: p.Chunk) -> None: ...

    def on_done(self, done: p.Done, outcome: p.Outcome) -> None: ...

    def on_failed(self, problem: Exception) -> None: ...


def test_a_long_stream_is_sent_again_in_few_frames_and_whole() -> None:
    calls = Calls(0.0)
    request = p.Request(prompt="x")
    calls.submit(make_submit(request, id="a", stream=True), request, Silent(), 0.0, 60.0)
    calls.take()
    count = 3 * MERGED + 7
    for start in range(count):
        chunk = p.encode(p.Chunk(start=start, token_ids=[start], text=f"{start} "))
        calls.on_message([p.encode(p.Chunks(ids=["a"])), chunk], 0.0)
    gap = p.encode(p.Chunk(start=count + 1, token_ids=[1], text="?"))
    calls.on_message([p.encode(p.Chunks(ids=["a"])), gap], 2.0)
    ((_, _, *frames),) = calls.take()
    assert len(frames) == 4
    whole = p.merge([p.chunk_body.decode(frame) for frame in frames])
    assert whole.token_ids == list(range(count))
    assert whole.text == "".join(f"{start} " for start in range(count))


def test_an_integer_past_64_bits_is_the_callers_fault() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**64}}}]
    with pytest.raises(InvalidRequest):
        encode_request(p.Request(prompt="x", tools=tools))
