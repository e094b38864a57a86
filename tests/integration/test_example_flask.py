"""examples/flask_app.py under gunicorn with four workers and --preload: one model for all of them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

from tests.integration.web_workers import (
    WebApp,
    assert_everybody_gets_their_own_answer,
    assert_import_without_torch,
    assert_no_torch,
    assert_web_workers_stay_small,
    expected,
    gunicorn,
)
from tests.pool import Pool, running_pool, wait_for


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with running_pool() as pool:
        pool.broker()
        pool.scripted("gpu0", "--slots", "32", "--steps-per-s", "200")
        yield pool


@pytest.fixture(scope="module")
def app(pool: Pool) -> Iterator[WebApp]:
    with gunicorn(pool, "--preload", "examples.flask_app:app") as app:
        yield app


def test_64_callers_at_once_each_get_their_own_answer(app: WebApp) -> None:
    assert_everybody_gets_their_own_answer(app)


def test_a_stream_arrives_whole(app: WebApp) -> None:
    status, text = app.post("/chat", {"message": "@say=streamed_words"})
    assert (status, text.decode()) == (200, "streamed words")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "JSON object"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "gen_params": [1]}, "gen_params"),
        ({"prompt": "x", "gen_params": {"model": "y"}}, "model"),
        ({"prompt": "x", "gen_params": {"temperature": 3}}, "temperature"),
        ({"prompt": "x", "gen_params": {"nonsense": 3}}, "nonsense"),
        ({"prompt": "x", "max_new_tokens": "many"}, "max_tokens"),
    ],
)
def test_bad_input_is_named_and_the_next_request_works(app: WebApp, body: object, said: str) -> None:
    status, answer = app.post("/generation", body)
    assert status == 400 and said in json.loads(answer)["message"]
    status, answer = app.post("/generation", {"prompt": "p", "max_new_tokens": 3, "gen_params": {"seed": 1}})
    assert status == 200
    assert json.loads(answer)["data"][0]["generated_text"] == "p" + expected("p", 1, 3)


def test_a_client_that_goes_away_gives_the_slot_back(app: WebApp, pool: Pool) -> None:
    connection = http.client.HTTPConnection(app.url[7:], timeout=30)
    connection.request(
        "POST", "/chat", json.dumps({"message": "@say=" + "x" * 190}), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.read(1)
    answer.close()
    connection.close()
    wait_for(lambda: pool.status().in_flight == 0, "the cancelled request to end")


def test_web_workers_stay_small_and_never_import_torch(app: WebApp) -> None:
    assert_import_without_torch("examples.flask_app")
    assert_web_workers_stay_small(app)
    assert_no_torch(app)
    assert app.stop() == 0
