"""Rates, hosts and origins."""

from __future__ import annotations

import pytest

from http_frontend.errors import HttpError
from http_frontend.incoming import Caller
from http_frontend.limits import Hosts, Origins, Rates, is_loopback
from tests.unit.http_frontend.serving import CHAT, serving, user

CALLER = Caller("a", "a", 5, 60, 600)


def test_a_minutes_requests_may_come_at_once_and_then_one_each_second() -> None:
    rates = Rates()
    for _ in range(60):
        rates.take(CALLER, 100.0)
    with pytest.raises(HttpError) as refused:
        rates.take(CALLER, 100.0)
    assert dict(refused.value.headers)["Retry-After"] == "1"
    rates.take(CALLER, 101.0)
    with pytest.raises(HttpError):
        rates.take(CALLER, 101.0)


def test_tokens_are_counted_when_they_are_known() -> None:
    rates = Rates()
    rates.take(CALLER, 0.0)
    rates.spend(CALLER, 900, 0.0)
    with pytest.raises(HttpError) as refused:
        rates.take(CALLER, 0.0)
    assert dict(refused.value.headers)["Retry-After"] == "31"  # back to one token
    rates.take(CALLER, 31.0)


def test_new_limits_of_a_key_hold_at_once() -> None:
    rates = Rates()
    rates.take(CALLER, 0.0)
    tight = Caller("a", "a", 5, 1, 0)
    rates.take(tight, 0.0)
    with pytest.raises(HttpError):
        rates.take(tight, 0.0)


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:80", "LOCALHOST"])
def test_on_loopback_its_names_are_served(host: str) -> None:
    Hosts("", loopback=True).check(host)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "[", "127.0.0.1.nip.io"])
def test_on_loopback_other_names_are_refused(host: str) -> None:
    with pytest.raises(HttpError) as refused:
        Hosts("", loopback=True).check(host)
    assert refused.value.status == 421


def test_hosts_may_be_listed_with_a_star() -> None:
    hosts = Hosts("api.example.org, *.example.net", loopback=False)
    hosts.check("api.example.org:8000")
    hosts.check("a.b.example.net")
    for bad in ("example.org", "example.net", "xexample.net"):
        with pytest.raises(HttpError):
            hosts.check(bad)


def test_what_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))  # noqa: S104


def test_origins() -> None:
    assert Origins("").lines("http://a") == b""
    assert b"http://a" in Origins("http://a/").lines("http://a")
    assert Origins("http://a").lines("http://b") == b""
    assert b"*" in Origins("*").lines("http://b")


async def test_a_foreign_host_gets_421_before_anything_else() -> None:
    async with serving() as served:
        status, text, _ = await served.get("/v1/models", headers={"Host": "evil.example"})
        assert status == 421
        assert "host_not_allowed" in text


async def test_cors_is_off_unless_set_and_answers_preflights_when_it_is() -> None:
    asked = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    async with serving() as served, served.http.options(CHAT, headers=asked) as answer:
        assert answer.status == 405
        assert "Access-Control-Allow-Origin" not in answer.headers
    async with serving(cors_origins="http://a") as served:
        async with served.http.options(CHAT, headers=asked) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == "http://a"
            assert "content-type" in answer.headers["Access-Control-Allow-Headers"]
        _, _, headers = await served.post(CHAT, {"messages": [user("x")]}, headers={"Origin": "http://a"})
        assert headers["Access-Control-Allow-Origin"] == "http://a"
        _, _, headers = await served.post(CHAT, {"messages": [user("x")]}, headers={"Origin": "http://b"})
        assert "Access-Control-Allow-Origin" not in headers


async def test_requests_past_the_limit_are_refused_with_a_hint() -> None:
    async with serving(max_requests=1) as served:
        served.frontend.metrics.in_hand = 1
        status, answer, headers = await served.post(CHAT, {"messages": [user("x")]})
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "overloaded", "1")
        served.frontend.metrics.in_hand = 0
