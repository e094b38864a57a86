"""A setting is declared once; flags, environment and help follow, and nonsense is refused in one line."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from msgspec import Meta, Struct

from broker import options
from broker.settings import BrokerSettings
from gpu_worker.settings import WorkerSettings
from http_frontend.settings import FrontendSettings


class Sample(Struct, frozen=True, kw_only=True):
    """A sample actor."""

    queue_limit: Annotated[int, Meta(ge=1, le=10, description="requests that wait | per model")] = 5
    grace_s: Annotated[float, Meta(ge=0, description="seconds")] = 1.5
    compile: Annotated[bool, Meta(description="compile the step")] = True
    level: Annotated[Literal["info", "debug"], Meta(description="least level")] = "info"
    path: Annotated[str, Meta(description="a file, 100% yours")] = ""


def load(*argv: str, **environ: str) -> Sample:
    return options.load(Sample, "python -m sample", argv, environ)


def test_defaults_hold_when_nothing_is_said() -> None:
    assert load() == Sample()


def test_a_flag_wins_over_the_environment() -> None:
    assert load("--queue-limit", "7", LOADONCE_QUEUE_LIMIT="3").queue_limit == 7
    assert load(LOADONCE_QUEUE_LIMIT="3").queue_limit == 3


@pytest.mark.parametrize("word", ["true", "1", "YES", "on"])
def test_switches_take_the_usual_words(word: str) -> None:
    assert load("--no-compile").compile is False
    assert load(LOADONCE_COMPILE="off").compile is False
    assert load("--no-compile", LOADONCE_COMPILE=word).compile is False
    assert load(LOADONCE_COMPILE=word).compile is True


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--queue-limit", "11"], {}, "--queue-limit"),
        (["--queue-limit", "many"], {}, "--queue-limit"),
        ([], {"LOADONCE_QUEUE_LIMIT": "0"}, "LOADONCE_QUEUE_LIMIT"),
        ([], {"LOADONCE_COMPILE": "maybe"}, "LOADONCE_COMPILE"),
        (["--level", "loud"], {}, "--level"),
        (["--quue-limit", "1"], {}, "--quue-limit"),
        (["stray"], {}, "stray"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    argv: list[str], environ: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        load(*argv, **environ)
    said = capsys.readouterr().err
    assert stop.value.code == options.EXIT_USAGE
    assert said.count("\n") == 1 and named in said


def test_help_shows_every_flag_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for option in options.options(Sample):
        assert option.flag in said and option.env in said and option.help in said


def test_a_misspelt_variable_is_named_with_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert load(LOADONCE_QUEUE_LIMITS="7", LOADONCE_SOMETHING="else", HOME="/") == Sample()
    (line,) = capsys.readouterr().err.splitlines()
    assert "LOADONCE_QUEUE_LIMITS" in line and "LOADONCE_QUEUE_LIMIT is" in line


def test_no_programs_setting_is_taken_for_a_misspelt_one_of_another() -> None:
    actors = (BrokerSettings, WorkerSettings, FrontendSettings)
    everything = {option.env: "" for actor in actors for option in options.options(actor)}
    everything |= {"LOADONCE_WORKER_COUNT": "", "LOADONCE_RUN_DIR": "", "LOADONCE_ADMIN": ""}
    for actor in actors:
        assert options.misspelt(actor, everything) == []


def test_the_table_has_a_row_for_each_setting() -> None:
    rows = options.table(Sample).splitlines()
    assert len(rows) == 2 + len(options.options(Sample))
    assert rows[2] == r"| `--queue-limit` | `LOADONCE_QUEUE_LIMIT` | `5` | requests that wait \| per model |"
