"""gunicorn with four web workers in front of a pool: what its tests ask of it, whichever app runs in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from examples.scripted_worker import scripted
from tests.pool import Pool, wait_for

WORKERS = 4
TOKENS = 24
MB = 1_000_000

#: Asked by SIGURG, each web worker writes down which modules it has imported.
HOOKS = """
import json, os, signal, sys
def dump(*_):
    path = os.path.join({directory!r}, "modules-%d" % os.getpid())
    with open(path, "w") as file:
        json.dump(sorted(sys.modules), file)
    os.rename(path, path + ".json")
def post_worker_init(worker):
    signal.signal(signal.SIGURG, dump)
"""


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class WebApp:
    """A running gunicorn."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, directory: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.directory = directory

    def workers(self) -> list[int]:
        """The pids of its web workers."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def post(self, path: str, body: Any) -> tuple[int, bytes]:
        """Status and body of the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as answer:
            with answer:
                return answer.code, answer.read()

    def modules(self) -> list[list[str]]:
        """What each web worker has in sys.modules."""
        for pid in self.workers():
            os.kill(pid, signal.SIGURG)
        written = [self.directory / f"modules-{pid}.json" for pid in self.workers()]
        wait_for(lambda: all(path.exists() for path in written), "the web workers' lists of modules")
        return [json.loads(path.read_text()) for path in written]

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextlib.contextmanager
def gunicorn(pool: Pool, *arguments: str) -> Iterator[WebApp]:
    """gunicorn in front of the pool, once its workers listen."""
    hooks = pool.directory / "hooks.py"
    hooks.write_text(HOOKS.format(directory=str(pool.directory)))
    port = free_port()
    where = ["-b", f"127.0.0.1:{port}", "-w", str(WORKERS)]
    process = pool.start("gunicorn", "-m", "gunicorn", "-c", str(hooks), *where, *arguments)
    app = WebApp(process, port, pool.directory)
    wait_for(lambda: len(app.workers()) == WORKERS and _answers(app), "gunicorn")
    yield app


def _answers(app: WebApp) -> bool:
    try:
        return app.post("/generation", {})[0] == 400
    except OSError:
        return False


def expected(prompt: str, seed: int, tokens: int = TOKENS) -> str:
    """What a scripted worker's answer must be."""
    return "".join(scripted(prompt, seed, tokens))


def assert_everybody_gets_their_own_answer(app: WebApp, callers: int = 64) -> None:
    """Ask `callers` different prompts at once and compare each answer with what it must be."""

    def ask(number: int) -> tuple[int, Any]:
        body = {"prompt": f"caller {number}", "max_new_tokens": TOKENS, "gen_params": {"seed": number}}
        status, answer = app.post("/generation", body)
        return status, json.loads(answer)

    with ThreadPoolExecutor(callers) as threads:
        answers = list(threads.map(ask, range(callers)))
    for number, (status, answer) in enumerate(answers):
        prompt = f"caller {number}"
        text = prompt + expected(prompt, number)
        assert (status, answer) == (200, {"code": 0, "data": [{"generated_text": text}]})


def assert_web_workers_stay_small(app: WebApp) -> None:
    """Each web worker has less than 100 MB resident."""
    sizes = [_resident_bytes(pid) / MB for pid in app.workers()]
    assert len(sizes) == WORKERS
    assert max(sizes) < 100, f"web workers take {sizes} MB"


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def assert_no_torch(app: WebApp) -> None:
    """No web worker has imported torch, transformers or the worker."""
    modules = app.modules()
    assert len(modules) == WORKERS
    for imported in modules:
        assert "broker.client" in imported
        assert not {"torch", "transformers", "gpu_worker"} & set(imported)


def assert_import_without_torch(module: str) -> None:
    """Importing the app alone brings no torch either."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60).returncode == 0
