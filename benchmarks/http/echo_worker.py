"""A worker that costs next to nothing, so that what is measured is everything before it.

Without `--tokens-per-s` it answers each request at once with the same 300 bytes. With it, every stream gets
a token at that rate, whose text is the time at which it was sent; streams are spread over `--phases`, as if
so many workers shared them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from broker import protocol as p
from broker.addresses import address
from broker.frames import readable, receive, send

TEXT: Final = "y" * 300
CHUNK: Final = p.encode(p.Chunk(token_ids=[1] * 60, text=TEXT))
OUTCOME: Final = p.encode(p.Outcome("stop", p.Usage(40, 60)))


class Echo:
    """Registers, beats, answers."""

    def __init__(self, tokens_per_s: float, phases: int) -> None:
        self.rate = tokens_per_s
        self.running: list[dict[str, list[int]]] = [{} for _ in range(phases)]  # id → [sent, limit]
        self.taken = 0
        self.session = ""
        self.socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(address("workers"))

    def run(self) -> None:
        """Serve until killed."""
        self.register()
        tick_s = 1 / (self.rate * len(self.running)) if self.rate else 0.3
        tick_due = beat_due = time.monotonic() + tick_s
        phase = 0
        while True:
            self.socket.poll(max(0, int(1000 * (tick_due - time.monotonic()))))
            self.receive()
            now = time.monotonic()
            if now >= beat_due:
                self.say(p.WorkerBeat(session=self.session, steps=int(now * 1000)))
                beat_due = now + p.BEAT_INTERVAL_S
            while tick_due <= now:
                tick_due += tick_s
                self.step(self.running[phase])
                phase = (phase + 1) % len(self.running)

    def say(self, message: p.WorkerMessage, body: list[bytes] | None = None) -> None:
        """Send one message."""
        send(self.socket, [p.encode(message), *(body or [])])

    def register(self) -> None:
        """Say that we can serve."""
        model = p.ModelInfo("echo", context=100_000, vocab=1000)
        self.say(
            p.Ready(
                name="echo", device="none", host="here", pid=os.getpid(), slots=4096, models=[model],
                session=self.session,
            )
        )  # fmt: skip

    def receive(self) -> None:
        """Take all that has come; answer at once, or note a stream."""
        ids = []
        while readable(self.socket):
            header, *body = receive(self.socket)
            message = p.to_worker.decode(header)
            if isinstance(message, p.Work) and self.rate:
                limit = p.request_body.decode(body[0]).params.max_tokens or 16
                self.running[self.taken % len(self.running)][message.id] = [0, limit]
                self.taken += 1
            elif isinstance(message, p.Work):
                ids.append(message.id)
            elif isinstance(message, p.CancelWork):
                for streams in self.running:
                    for id in message.ids:
                        streams.pop(id, None)
            elif isinstance(message, p.BrokerBeat) and message.session != self.session:
                self.session = message.session
                self.register()
        if ids:
            self.say(p.Chunks(ids, [60] * len(ids)), [CHUNK] * len(ids))
            for id in ids:
                self.say(p.Done(id), [OUTCOME])

    def step(self, streams: dict[str, list[int]]) -> None:
        """One token for each stream of a phase."""
        if not streams or not self.rate:
            return
        text = f"{time.monotonic():.6f}"
        frames = [p.encode(p.Chunk(sent, [1], text)) for sent, _ in streams.values()]
        self.say(p.Chunks(list(streams), [1] * len(frames)), frames)
        for id, state in list(streams.items()):
            state[0] += 1
            if state[0] >= state[1]:
                del streams[id]
                self.say(p.Done(id), [p.encode(p.Outcome("length", p.Usage(40, state[1])))])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens-per-s", type=float, default=0.0)
    parser.add_argument("--phases", type=int, default=1)
    given = parser.parse_args()
    Echo(given.tokens_per_s, given.phases).run()
