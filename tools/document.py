"""Writes the settings tables into README.md from their declarations; `--check` only says if they differ."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from msgspec import Struct

from broker.options import table
from broker.settings import BrokerSettings
from gpu_worker.settings import WorkerSettings
from http_frontend.settings import FrontendSettings

README: Final = Path(__file__).resolve().parent.parent / "README.md"
TABLES: Final[dict[str, type[Struct]]] = {
    "broker": BrokerSettings,
    "gpu_worker": WorkerSettings,
    "http_frontend": FrontendSettings,
}


def filled(text: str) -> str:
    """The text with each table between its markers made anew.

    Raises:
        ValueError: a marker is missing.
    """
    for name, settings in TABLES.items():
        begin, end = f"<!-- settings: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{README.name} has no place {begin}")
        block = f"{begin}\n{table(settings)}\n{end}"
        text = pattern.sub(block.replace("\\", r"\\"), text)
    return text


def main(argv: list[str]) -> int:
    """Fill the tables, or with ``--check`` return 1 if they aren't what the code declares."""
    text = README.read_text()
    wanted = filled(text)
    if "--check" in argv:
        if wanted != text:
            print("README.md's settings tables differ from the code: run `make docs`")
        return int(wanted != text)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
