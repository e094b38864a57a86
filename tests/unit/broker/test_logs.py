"""A log line is one line of JSON, whatever a caller puts into it."""

from __future__ import annotations

import io
import json

import pytest

from broker.logs import SELDOM_S, Log, Seldom


def test_one_event_is_one_json_line_with_its_fields() -> None:
    out = io.StringIO()
    Log("broker", stream=out).info("worker_ready", worker="gpu0", slots=4)
    (line,) = out.getvalue().splitlines()
    said = json.loads(line)
    assert (said["actor"], said["level"], said["event"]) == ("broker", "info", "worker_ready")
    assert (said["worker"], said["slots"]) == ("gpu0", 4)


@pytest.mark.parametrize("nasty", ["a\nb", "\x1b[31m", "lone \ud800 half", "\u2028", '"}{'])
def test_c15_nasty_text_stays_inside_its_line(nasty: str) -> None:
    out = io.StringIO()
    Log("broker", stream=out).warning("bad", text=nasty)
    assert out.getvalue().isascii() and out.getvalue().count("\n") == 1
    assert json.loads(out.getvalue())["text"] == nasty


def test_levels_below_the_least_are_not_written() -> None:
    out = io.StringIO()
    log = Log("broker", level="warning", stream=out)
    log.debug("a")
    log.info("b")
    log.warning("c")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["c"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        Log("broker", level="loud")


def test_an_exception_is_logged_whole_on_one_line() -> None:
    out = io.StringIO()
    try:
        raise RuntimeError("boom")
    except RuntimeError as problem:
        Log("broker", stream=out).error("step_failed", exc=problem)
    assert out.getvalue().count("\n") == 1
    assert "RuntimeError: boom" in json.loads(out.getvalue())["traceback"]


def test_a_full_disk_does_not_stop_the_actor() -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    Log("broker", stream=FullDisk()).info("goes_on")


def test_what_happens_often_is_said_seldom_with_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("broker.logs.time.monotonic", lambda: now)
    said: list[tuple[int, str]] = []
    seldom = Seldom(lambda count, reason: said.append((count, reason)))
    for number in range(3):
        seldom.note(f"reason {number}")
    now += SELDOM_S
    seldom.note("later")
    assert said == [(1, "reason 0"), (3, "later")]
