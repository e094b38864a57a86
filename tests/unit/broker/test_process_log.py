"""The last line of any log becomes one readable sentence."""

from __future__ import annotations

import io
from pathlib import Path

from broker.logs import Log
from broker.process_log import MAX_CHARS, last_words, sentence


def test_a_json_line_is_its_event_and_fields() -> None:
    stream = io.StringIO()
    Log("worker/gpu0", stream=stream).info("loading", shard="2/6", gib=3.4)
    assert sentence(stream.getvalue()) == "loading shard=2/6 gib=3.4"


def test_of_an_error_the_traceback_s_last_line_is_kept() -> None:
    stream = io.StringIO()
    try:
        raise OSError("disk on fire")
    except OSError as problem:
        Log("worker", stream=stream).error("failed", exc=problem)
    assert sentence(stream.getvalue()) == "failed OSError: disk on fire"


def test_a_plain_line_stays_as_it_is() -> None:
    assert sentence("python -m gpu_worker: no such model\n") == "python -m gpu_worker: no such model"


def test_control_characters_and_endless_lines_are_tamed() -> None:
    shown = sentence("\x1b[31m" + "x" * 10_000)
    assert "\x1b" not in shown and len(shown) == MAX_CHARS


def test_only_the_end_of_a_large_file_is_read(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.write_bytes(b"old line\n" * 1_000_000 + b"the reason\n\n")
    assert last_words(log) == "the reason"


def test_no_file_and_an_empty_file_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    assert last_words(tmp_path / "empty.log") == last_words(tmp_path / "none.log") == ""
