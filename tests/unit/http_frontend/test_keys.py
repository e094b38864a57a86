"""Keys in their file and at the door."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
from pathlib import Path

import pytest

from http_frontend import keys as keys_module
from http_frontend.keys import KeyFileError, Keys, digest_of
from tests.unit.http_frontend.fake_pool import FakePool, Submitted
from tests.unit.http_frontend.serving import CHAT, serving, user


def make_key(path: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert keys_module.main(["--file", str(path), *options]) == 0
    return capsys.readouterr().out.strip()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_is_printed_once_and_only_its_hash_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    key = make_key(path, "--name", "alice", "--tenant", "red", "--priority", "3", capsys=capsys)
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = Keys(path)
    assert keys.reload()
    owner = keys.owner(f"Bearer {key}")
    assert owner is not None
    assert (owner.name, owner.tenant, owner.priority) == ("alice", "red", 3)
    for wrong in (f"Bearer {key}x", "Bearer ", "", key, f"Digest {key}", "Basic !!!", "Bearer \udce4"):
        assert keys.owner(wrong) is None


def test_a_browser_may_send_the_key_as_a_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = make_key(tmp_path / "k", "--name", "a", capsys=capsys)
    keys = Keys(tmp_path / "k")
    keys.reload()
    assert keys.owner("Basic " + base64.b64encode(f"any:{key}".encode()).decode()) is not None


def test_the_tool_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k"
    make_key(path, "--name", "a", capsys=capsys)
    assert keys_module.main(["--file", str(path), "--name", "a"]) == 1
    assert "already" in capsys.readouterr().err
    assert keys_module.main(["--file", str(path), "--name", "b", "--priority", "12"]) == 1
    assert "priority" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[{}]", '[{"name": "a", "sha256": "xyz"}]', '[{"nam": "a"}]'])
def test_a_file_that_cant_be_used_keeps_the_keys_there_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "k"
    key = make_key(path, "--name", "a", capsys=capsys)
    keys = Keys(path)
    keys.reload()
    path.write_text(text)
    with pytest.raises(KeyFileError):
        keys.reload()
    assert keys.owner(f"Bearer {key}") is not None
    assert not keys.reload()  # not tried again until it changes


def test_a_changed_file_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k"
    first = make_key(path, "--name", "a", capsys=capsys)
    keys = Keys(path)
    keys.reload()
    assert not keys.reload()
    path.write_text(json.dumps([{"name": "b", "sha256": digest_of("new").hex()}]))
    os.utime(path, ns=(1, 1))
    assert keys.reload()
    assert keys.owner(f"Bearer {first}") is None
    assert keys.owner("Bearer new") is not None


async def test_nothing_but_health_is_served_without_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "k"
    key = make_key(path, "--name", "a", "--priority", "4", capsys=capsys)
    keys = Keys(path)
    keys.reload()
    async with serving(keys=keys) as served:
        assert (await served.get("/health"))[0] == 200
        for route in ("/ready", "/metrics", "/v1/models", "/", "/docs", "/openapi.json", "/nope"):
            status, text, headers = await served.get(route)
            assert status == 401, route
            assert json.loads(text)["error"]["code"] == "invalid_api_key"
            assert headers["WWW-Authenticate"].startswith("Basic" if route in ("/", "/docs") else "Bearer")
        for headers in ({}, bearer("lo-wrong")):
            status, answer, _ = await served.post(CHAT, {"messages": [user("x")]}, headers=headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert not served.pool.submitted
        body = {"messages": [user("x")], "priority": 0}
        status, _, _ = await served.post(CHAT, body, headers=bearer(key))
        assert status == 200
        submit = served.pool.submitted[0].submit
        assert (submit.tenant, submit.priority) == ("a", 4)  # no better than the key may
        served.frontend.access.flush()
        assert key not in served.pool.access.getvalue()
        assert '"key":"a"' in served.pool.access.getvalue()


async def test_a_keys_rate_is_kept_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k"
    limits = ("--requests-per-minute", "2", "--tokens-per-minute", "1000")
    key = make_key(path, "--name", "a", *limits, capsys=capsys)
    other = make_key(path, "--name", "b", capsys=capsys)
    keys = Keys(path)
    keys.reload()
    async with serving(keys=keys) as served:
        body = {"messages": [user("x")]}
        status, _, headers = await served.post(CHAT, body, headers=bearer(key))
        assert status == 200
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert headers["x-ratelimit-remaining-requests"] == "1"
        assert headers["x-ratelimit-remaining-tokens"] == "1000"
        await served.post(CHAT, body, headers=bearer(key))
        status, answer, headers = await served.post(CHAT, body, headers=bearer(key))
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(headers["Retry-After"]) <= 30
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert len(served.pool.submitted) == 2
        status, _, headers = await served.post(CHAT, body, headers=bearer(other))
        assert status == 200
        assert "x-ratelimit-limit-requests" not in headers


async def test_tokens_of_a_stream_that_was_left_early_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "k"
    key = make_key(path, "--name", "a", "--tokens-per-minute", "100", capsys=capsys)
    keys = Keys(path)
    keys.reload()

    def script(got: Submitted) -> None:
        for _ in range(150):
            got.say("x")

    pool = FakePool(script)
    async with serving(pool, keys=keys) as served:
        body = {"messages": [user("x")], "stream": True}
        async with served.http.post(CHAT, json=body, headers=bearer(key)) as answer:
            assert answer.status == 200
            await answer.content.readany()
        async with asyncio.timeout(5):
            while not pool.cancelled:
                await asyncio.sleep(0.01)
        status, said, _ = await served.post(CHAT, {"messages": [user("x")]}, headers=bearer(key))
        assert (status, said["error"]["code"]) == (429, "rate_limit_exceeded")
