"""A worker without a model: answers are a pure function of the request, so tests know them beforehand.

Speaks the worker's side of the protocol (docs/protocol.md) with pyzmq and the broker's public face. The
answer to a prompt is `scripted(prompt, seed)`: words numbered from 0, each one token. A prompt may hold
orders: ``@crash=7`` kills the worker before token 7, ``@hang=7`` makes it stop there, ``@fail=7`` ends the
request in an error, ``@say=text`` sets the answer.

    python examples/scripted_worker.py --name gpu0 --steps-per-s 50 --slots 8
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from broker import protocol as p
from broker.addresses import address
from broker.errors import InternalError, InvalidRequest, LoadOnceError
from broker.lifeline import end_with_supervisor

WORDS = 1_000
ORDER = re.compile(r"@(crash|hang|fail|say)=(\S+)")


def scripted(prompt: str, seed: int, count: int) -> list[str]:
    """The words that answer a prompt: the same on every worker, from wherever it goes on."""
    said = dict(ORDER.findall(prompt)).get("say")
    if said is not None:
        return re.findall(r".", said.replace("_", " "))[:count]
    base = zlib.crc32(f"{prompt}/{seed}".encode())
    return [f" w{(base + 7919 * i) % WORDS}" for i in range(count)]


@dataclass
class Job:
    """One request in hand."""

    words: list[str]
    orders: dict[str, str]
    prompt_tokens: int
    at: int  # the next word
    limit: int
    seed: int | None

    def next_chunk(self, words: int) -> p.Chunk:
        """The next words as one chunk."""
        taken = self.words[self.at : self.at + words]
        ids = [zlib.crc32(word.encode()) % WORDS for word in taken]
        chunk = p.Chunk(start=self.at, token_ids=ids, text="".join(taken))
        self.at += len(taken)
        return chunk

    def ordered(self, what: str) -> bool:
        """Whether the prompt orders something before the next word."""
        return what in self.orders and self.at >= int(self.orders[what])

    def outcome(self) -> p.Outcome:
        """How it ends."""
        reason = "length" if len(self.words) == self.limit else "stop"
        usage = p.Usage(self.prompt_tokens, len(self.words))
        return p.Outcome(
            finish_reason="length" if reason == "length" else "stop", usage=usage, seed=self.seed
        )


class ScriptedWorker:
    """Registers, takes work, makes one word per request and step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.jobs: dict[str, Job] = {}
        self.session = ""
        self.stopping = False
        self.leaves_at = float("inf")
        self.steps = self.tokens = self.prompt_tokens = 0
        self.socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.connect(args.workers or address("workers"))

    def run(self) -> None:
        """Serve until told to leave."""
        self.register()
        step_due = time.monotonic()
        beat_due = step_due + p.BEAT_INTERVAL_S  # the registration counts as the first
        while time.monotonic() < self.leaves_at and not (self.stopping and not self.jobs):
            due = min(beat_due, step_due if self.jobs else beat_due)
            if self.socket.poll(max(0, int(1000 * (due - time.monotonic())))):
                self.receive()
            now = time.monotonic()
            if now >= beat_due:
                self.beat()
                beat_due = now + p.BEAT_INTERVAL_S
            if self.jobs and now >= step_due:
                self.step()
                step_due = max(step_due + 1 / self.args.steps_per_s, now - 1 / self.args.steps_per_s)
        if self.jobs:
            self.say(p.HandOff(ids=list(self.jobs)))
        self.say(p.Leave())

    def say(self, message: p.WorkerMessage, body: list[bytes] | None = None) -> None:
        """Send one message."""
        self.socket.send_multipart([p.encode(message), *(body or [])])

    def register(self) -> None:
        """Say that we can serve."""
        models = [
            p.ModelInfo(name=name, context=self.args.context, vocab=WORDS, aliases=[f"{name}-alias"])
            for name in self.args.models.split(",")
        ]
        self.say(
            p.Ready(
                name=self.args.name, device="none", host=socket.gethostname(), pid=os.getpid(),
                slots=self.args.slots, models=models, session=self.session, device_uuid=self.args.device_uuid,
            )
        )  # fmt: skip

    def beat(self) -> None:
        """Say that we live; register again if the broker doesn't know us."""
        self.say(
            p.WorkerBeat(
                session=self.session, running=len(self.jobs), steps=self.steps,
                generated_tokens=self.tokens, prompt_tokens=self.prompt_tokens,
            )
        )  # fmt: skip
        if not self.session:
            self.register()

    def receive(self) -> None:
        """Take all that has come."""
        while True:
            try:
                header, *body = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = p.decode_header(p.to_worker, header)
            match message:
                case p.Work():
                    self.take(message, body)
                case p.CancelWork():
                    for id in message.ids:
                        self.jobs.pop(id, None)
                case p.BrokerBeat():
                    if self.session and message.session != self.session:
                        self.jobs.clear()
                        self.session = message.session
                        self.register()
                    self.session = message.session
                case p.Drain():
                    self.drain(message.grace_ms / 1000)
                case p.Failed():
                    print(f"broker says: {message.message}", file=sys.stderr, flush=True)
                    self.jobs.clear()
                    self.session = ""  # registers again with the next beat

    def drain(self, grace_s: float) -> None:
        """Take nothing new, finish what there is time for."""
        self.stopping = True
        self.leaves_at = min(self.leaves_at, time.monotonic() + grace_s)

    def take(self, work: p.Work, body: list[bytes]) -> None:
        """Begin, or go on with, a request."""
        if self.stopping:
            self.say(p.HandOff(ids=[work.id]))
            return
        try:
            request = p.decode_request(body[0])
            had = sum(len(p.chunk_body.decode(frame).token_ids) for frame in body[1:])
        except LoadOnceError as problem:
            self.say(p.Failed.of(problem, work.id))
            return
        except msgspec.MsgspecError as problem:
            self.say(p.Failed.of(InvalidRequest(f"chunks: {problem}", param="chunks"), work.id))
            return
        prompt = request.prompt or " ".join(turn.text for turn in request.messages or [])
        limit = request.params.max_tokens if request.params.max_tokens is not None else 16
        words = scripted(prompt, request.params.seed or 0, limit)
        if request.task != "generate":
            words = prompt.split() or [str(id) for id in request.token_ids or []]
        prompt_tokens = len(request.token_ids or prompt.split())
        self.prompt_tokens += prompt_tokens
        orders = dict(ORDER.findall(prompt))
        self.jobs[work.id] = Job(words, orders, prompt_tokens, had, limit, request.params.seed)

    def step(self) -> None:
        """One word for each request in hand, in one message."""
        self.steps += 1
        ids, frames, counts = [], [], []
        for id, job in list(self.jobs.items()):
            if job.ordered("crash"):
                os.kill(os.getpid(), signal.SIGKILL)
            if job.ordered("hang"):
                time.sleep(3600)
            if job.ordered("fail"):
                del self.jobs[id]
                self.say(p.Failed.of(InternalError("the prompt ordered it"), id))
            elif job.at < len(job.words):
                chunk = job.next_chunk(self.args.words_per_step)
                ids.append(id)
                frames.append(p.encode(chunk))
                counts.append(len(chunk.token_ids))
        self.tokens += sum(counts)
        if ids:
            self.say(p.Chunks(ids=ids, tokens=counts), frames)
        for id, job in list(self.jobs.items()):
            if job.at >= len(job.words):
                del self.jobs[id]
                self.say(p.Done(id=id), [p.encode(job.outcome())])


def main() -> None:
    """Parse the flags and serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--name", default=f"scripted-{os.getpid()}")
    parser.add_argument("--workers", default="", help="address of the broker's worker socket")
    parser.add_argument("--models", default="scripted", help="names, separated by commas")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=100_000)
    parser.add_argument("--steps-per-s", type=float, default=50.0)
    parser.add_argument("--words-per-step", type=int, default=1)
    parser.add_argument("--grace-s", type=float, default=20.0)
    parser.add_argument("--device-uuid", default="")
    worker = ScriptedWorker(parser.parse_args())

    def leave(*_: Any) -> None:
        worker.drain(worker.args.grace_s)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    end_with_supervisor()
    worker.run()


if __name__ == "__main__":
    main()
