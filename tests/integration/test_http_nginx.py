"""nginx in front, with its own defaults: tokens still arrive one by one."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.http_serving import HttpPool, free_port, http_pool
from tests.pool import wait_for

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

CONFIG = """
daemon off;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {home}/body;
  proxy_temp_path {home}/proxy;
  fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi;
  scgi_temp_path {home}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://127.0.0.1:{behind}; }}
  }}
}}
"""


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[HttpPool, str]]:
    if NGINX is None:
        pytest.skip("nginx is not installed")
    tmp_path.chmod(0o755)
    with http_pool(worker=("--steps-per-s", "20")) as served:
        port = free_port()
        config = tmp_path / "nginx.conf"
        config.write_text(CONFIG.format(home=tmp_path, port=port, behind=served.port))
        process = subprocess.Popen([NGINX, "-c", config, "-p", tmp_path], stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers(url), "nginx")
            yield served, url
        finally:
            process.terminate()
            process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_c22_tokens_arrive_one_by_one_through_nginx(proxied: tuple[HttpPool, str]) -> None:
    _, url = proxied
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    arrivals = []
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        for line in answer:
            if line.startswith(b"data: {") and b'"content":" ' in line:
                arrivals.append(time.monotonic())
    assert len(arrivals) == 20
    gaps = [later - earlier for earlier, later in zip(arrivals, arrivals[1:], strict=False)]
    assert arrivals[-1] - arrivals[0] > 0.5  # twenty words at twenty a second: not in one blob
    assert sum(gap > 0.02 for gap in gaps) >= 15


def test_a_client_that_leaves_nginx_frees_the_worker(proxied: tuple[HttpPool, str]) -> None:
    served, url = proxied
    body = {"prompt": "x", "max_tokens": 5000, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.readline()
    wait_for(lambda: served.running() == 0, "the worker to be free", 2.0)
