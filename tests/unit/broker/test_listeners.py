"""A stream's reader and one who waits for the whole answer."""

from __future__ import annotations

from broker import protocol as p
from broker.errors import LoadOnceError, Overloaded
from broker.listeners import Event, Reader, Whole, served
from broker.requests import Completion

DONE = p.Done(id="a", worker="gpu0", attempts=1)
OUTCOME = p.Outcome("length", p.Usage(1, 2))


def test_a_reader_that_keeps_up_hears_everything() -> None:
    heard: list[Event] = []
    reader = Reader(heard.append, lambda: 0, lambda: None, most=1)
    reader.on_chunk(p.Chunk(0, [1], "a"))
    reader.on_chunk(p.Chunk(1, [2], "b"))
    reader.on_done(DONE, OUTCOME)
    assert heard == [p.Chunk(0, [1], "a"), p.Chunk(1, [2], "b"), (DONE, OUTCOME)]


def test_a_reader_too_far_behind_is_given_up_once_and_hears_nothing_more() -> None:
    heard: list[Event] = []
    cancelled: list[str] = []
    reader = Reader(heard.append, lambda: len(heard), lambda: cancelled.append("a"), most=2)
    for at in range(5):
        reader.on_chunk(p.Chunk(at, [at], "x"))
    reader.on_done(DONE, OUTCOME)
    reader.on_failed(LoadOnceError("late"))
    assert cancelled == ["a"]
    assert [type(event) for event in heard] == [p.Chunk, p.Chunk, Overloaded]
    assert "2 chunks behind" in str(heard[-1])


def test_a_whole_answer_has_no_limit_of_chunks() -> None:
    settled: list[Completion | LoadOnceError] = []
    whole = Whole(settled.append)
    for at in range(20_000):
        whole.on_chunk(p.Chunk(at, [at], "x"))
    whole.on_done(DONE, OUTCOME)
    (answer,) = settled
    assert isinstance(answer, Completion)
    assert (len(answer.text), len(answer.token_ids), answer.worker) == (20_000, 20_000, "gpu0")


def test_a_model_is_served_by_its_name_or_alias_while_it_has_workers() -> None:
    models = [p.ModelInfo("big", 10, 10, aliases=["b"], workers=1), p.ModelInfo("away", 10, 10)]
    assert served(models, "") and served(models, "big") and served(models, "b")
    assert not served(models, "away") and not served(models, "other") and not served([], "")
