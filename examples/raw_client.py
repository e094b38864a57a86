"""A client with pyzmq and msgpack alone: the protocol of docs/protocol.md, no LoadOnce code.

python examples/raw_client.py "The capital of France is"            # REQ, one answer
python examples/raw_client.py --stream "Once upon a time"           # DEALER, as it comes
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import uuid
from typing import Any

import msgpack
import zmq

PING_S = 1.0


class Refused(Exception):
    """The broker or a worker said no."""


def ask(address: str, request: dict[str, Any]) -> str:
    """Send one request over a REQ socket and wait for the whole answer.

    Raises:
        Refused: with the error's code and message.
    """
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(address)
        header = {"type": "submit", "id": uuid.uuid4().hex}
        socket.send_multipart([msgpack.packb(header), msgpack.packb(request)])
        answer, *body = [msgpack.unpackb(frame) for frame in socket.recv_multipart()]
    if answer["type"] == "error":
        raise Refused(f"{answer['code']}: {answer['message']}")
    _, *chunks = body
    return "".join(chunk.get("text", "") for chunk in chunks)


def stream(address: str, request: dict[str, Any]) -> Any:
    """Send one request over a DEALER socket; yields its text as it comes, whatever dies meanwhile.

    Raises:
        Refused: with the error's code and message.
    """
    request.setdefault("params", {}).setdefault("seed", uuid.uuid4().int >> 66)
    submit = [msgpack.packb({"type": "submit", "id": "mine", "stream": True}), msgpack.packb(request)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.setsockopt(zmq.ROUTING_ID, b"raw-" + os.urandom(12))
        socket.connect(address)
        socket.send_multipart(submit)
        received: list[bytes] = []
        tokens = stamp = 0
        ping_due = time.monotonic() + PING_S
        while True:
            if time.monotonic() >= ping_due:
                stamp += 1
                socket.send(msgpack.packb({"type": "ping", "pending": ["mine"], "stamp": stamp}))
                ping_due = time.monotonic() + PING_S
            if not socket.poll(100):
                continue
            header, *body = socket.recv_multipart()
            message = msgpack.unpackb(header)
            if message["type"] == "chunk":
                chunk = msgpack.unpackb(body[0])
                if chunk.get("start", 0) == tokens:
                    tokens += len(chunk.get("token_ids", []))
                    received.append(body[0])
                    yield chunk.get("text", "")
            elif message["type"] == "pong" and message.get("unknown") and message["stamp"] == stamp:
                socket.send_multipart([*submit, *received])  # a new broker: go on from what we have
            elif message["type"] == "error":
                raise Refused(f"{message['code']}: {message['message']}")
            elif message["type"] == "done":
                return


def main() -> int:
    """Ask and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default=f"ipc:///tmp/loadonce-{os.getuid()}/clients")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--stream", action="store_true")
    args = parser.parse_args()
    request = {"prompt": args.prompt, "params": {"max_tokens": args.max_tokens, "temperature": 0.0}}
    try:
        if args.stream:
            for text in stream(args.address, request):
                print(text, end="", flush=True)
            print()
        else:
            print(ask(args.address, request))
    except Refused as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
