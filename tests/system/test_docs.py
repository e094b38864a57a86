"""What the pages say is so: commands run, metrics exist, files are there, state tables are the code's."""

from __future__ import annotations

import configparser
import enum
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from broker.inflight import TRANSITIONS
from broker.workers import WORKER_TRANSITIONS
from tests.pool import ROOT, wait_for
from tests.system.supervised import Supervised, supervised

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
#: Commands that tests/system covers elsewhere, or that change the machine: only their first word is checked.
ELSEWHERE = (
    "make run",
    "make install",
    "git pull",
    "supervisord -c",
    "supervisorctl shutdown",
    "supervisorctl tail -f",
)


def commands(page: Path) -> list[str]:
    """Every line of the page's shell blocks, joined where it is continued, without its comment."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s{2,}#.*", "", line).strip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def running() -> Iterator[Supervised]:
    with supervised() as place:
        place.scripted()
        place.start_ready()
        wait_for(lambda: len(place.status().workers) == 2, "both workers")
        yield place


@pytest.mark.parametrize(
    "command", [c for c in commands(DOCS / "operating.md") if c.startswith("supervisorctl")]
)
def test_each_supervisorctl_command_of_the_operating_page_works(running: Supervised, command: str) -> None:
    if command.startswith(ELSEWHERE):
        pytest.skip("covered in test_programs.py")
    done = running.ctl(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stdout
    assert "ERROR" not in done.stdout and "Unknown syntax" not in done.stdout
    wait_for(running.ready, "the pool")


def test_admin_commands_of_the_pages_work(running: Supervised) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "broker.admin", "status", "--json"],
        env=running.environment, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and len(json.loads(done.stdout)["workers"]) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_program_and_flag_that_a_page_calls_exists(page: Path) -> None:
    helps: dict[str, str] = {}
    for command in commands(page):
        called = re.search(
            r"python3? -m (broker\S*|gpu_worker|http_frontend\S*)( plan| check)?( .*)?$", command
        )
        if called is None:
            continue
        module = called[1] + (called[2] or "")
        if module not in helps:
            line = [sys.executable, "-m", *module.split(), "--help"]
            done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=ROOT)
            assert done.returncode == 0, f"{command}: {done.stderr}"
            helps[module] = done.stdout
        for flag in re.findall(r"--[a-z-]+", called[3] or ""):
            assert flag in helps[module], f"{page.name}: {module} has no {flag}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_link_to_a_file_or_heading_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_variable_that_a_page_names_is_a_setting(page: Path) -> None:
    from broker.options import options
    from broker.settings import BrokerSettings
    from gpu_worker.settings import WorkerSettings
    from http_frontend.settings import FrontendSettings

    known = {"LOADONCE_WORKER_COUNT"}
    known |= {option.env for s in (BrokerSettings, WorkerSettings, FrontendSettings) for option in options(s)}
    named = set(re.findall(r"LOADONCE_[A-Z_]+[A-Z]", page.read_text()))
    assert named <= known, f"{page.name}: {named - known}"


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def metrics(running: Supervised) -> set[str]:
    """Every metric of a pool that has answered something, by the name that queries use."""
    running.assert_answers()
    status, body = running.http("/metrics")
    assert status == 200
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", body.decode(), re.MULTILINE))
    parts = ("_bucket", "_sum", "_count")
    return set(kinds) | {name + part for name, kind in kinds.items() if kind == "histogram" for part in parts}


@pytest.mark.parametrize("name", ["prometheus-alerts.yml", "grafana-dashboard.json"])
def test_alerts_and_dashboard_ask_for_metrics_that_exist(metrics: set[str], name: str) -> None:
    used = set(re.findall(r"\bloadonce_\w+", (DOCS / name).read_text()))
    assert used
    assert used <= metrics, f"no such metric: {used - metrics}"


def test_alert_rules_are_whole() -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((DOCS / "prometheus-alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert rule["alert"].startswith("LoadOnce") and rule["expr"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["do"]


def test_the_dashboard_s_panels_have_a_source_and_a_query() -> None:
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) >= 12
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["expr"] for target in panel["targets"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


# ── states ───────────────────────────────────────────────────────────────────────────────────────────


def state_table(transitions: Mapping[enum.Enum, frozenset[enum.Enum]]) -> str:
    """The transition table as the page has it."""
    rows = ["| from | to |", "|---|---|"]
    for state, following in transitions.items():
        rows.append(f"| {state.value} | {', '.join(sorted(s.value for s in following)) or '–'} |")
    return "\n".join(rows)


def test_the_state_tables_are_the_code_s() -> None:
    text = (DOCS / "architecture.md").read_text()
    for name, transitions in (("request", TRANSITIONS), ("worker", WORKER_TRANSITIONS)):
        shown = text.split(f"<!-- states: {name} -->\n")[1].split("\n<!-- end")[0]
        assert shown == state_table(transitions)  # type: ignore[arg-type]


# ── what starts it ───────────────────────────────────────────────────────────────────────────────────


def test_the_systemd_unit_is_well_formed() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "deploy" / "loadonce.service")
    service = unit["Service"]
    assert "--nodaemon" in service["ExecStart"] and "supervisord.conf" in service["ExecStart"]
    assert service["KillMode"] == "mixed"  # supervisord alone gets SIGTERM and stops the rest in order
    assert int(service["TimeoutStopSec"]) > 40 + 40 + 10 + 5  # every stopwaitsecs, one group after another
    assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_systemd_unit_passes_systemd_s_own_check(tmp_path: Path) -> None:
    unit = tmp_path / "loadonce.service"
    text = (ROOT / "deploy" / "loadonce.service").read_text()
    unit.write_text(re.sub(r"/srv/loadonce/\.venv/bin/\w+", "/bin/true", text).replace("User=loadonce\n", ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert "loadonce.service" not in done.stderr, done.stderr


def test_the_dockerfile_copies_nothing_strange_and_runs_as_nobody_special() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    words = [step[0] for step in steps]
    assert words[0] == "FROM" and words[-1] == "CMD"
    assert set(words) <= {
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "USER",
        "ARG",
        "ENV",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "CMD",
    }
    assert words.index("USER") < words.index("CMD")
    command = json.loads(steps[-1][1])
    assert command[0].endswith("supervisord") and "--nodaemon" in command  # exec form: signals reach it
    (health,) = [step[1] for step in steps if step[0] == "HEALTHCHECK"]
    assert json.loads(health.split("CMD", 1)[1])[0].endswith("python")
    assert (ROOT / "deploy" / "container.conf").exists()
    assert "install:" in (ROOT / "Makefile").read_text()


def test_an_image_holds_nothing_of_the_machine_that_built_it() -> None:
    """Git's own list of what isn't the repository's, and keys, stay out of `COPY . .`."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    left_out = {line.strip("*/") for line in lines if line and line[0] not in "#!"}
    assert {".git", ".venv", "run", "node_modules", "keys.json"} <= left_out
    assert "!run/.gitkeep" in lines, "the image needs the folder"


def test_the_compose_file_publishes_to_this_host_only_and_waits_long_enough() -> None:
    yaml = pytest.importorskip("yaml")
    service = yaml.safe_load((ROOT / "deploy" / "compose.yml").read_text())["services"]["loadonce"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert int(service["stop_grace_period"].rstrip("s")) > 95
    (gpus,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert service["environment"]["LOADONCE_WORKER_COUNT"] == gpus["count"], "one worker for each GPU"
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "LOADONCE_WORKER_COUNT=1" in image, "container.conf reads it: unset, it stops supervisord"
    assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).exists()
