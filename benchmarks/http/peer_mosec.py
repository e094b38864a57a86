"""mosec: a Rust frontend and one Python worker behind a socket. Flags are mosec's own."""

from __future__ import annotations

from typing import Any

from mosec import Server, Worker


class Echo(Worker):  # type: ignore[misc]
    """Answers 300 bytes; mosec has decoded the body."""

    def forward(self, data: Any) -> dict[str, str]:
        """The answer to one request."""
        return {"text": "y" * 300}


if __name__ == "__main__":
    server = Server()
    server.append_worker(Echo, num=1)
    server.run()
