"""The real worker, with a model that never returns from a step with a certain prompt in it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_worker import __main__, runner

HANGS_ON: Final = [7, 7, 7]  # a prompt


def main() -> int:
    """Run the worker; the arguments are its own."""
    forward = runner.Runner.forward

    def hang(self: runner.Runner, rows: Sequence[Any]) -> Any:
        if any(row.sequence.token_ids[:3] == HANGS_ON for row in rows):
            threading.Event().wait()
        return forward(self, rows)

    runner.Runner.forward = hang  # type: ignore[method-assign]
    return __main__.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
