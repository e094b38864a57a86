"""`supervisorctl pool`: each verb in supervisorctl's own controller, with broker and supervisord played."""

from __future__ import annotations

import io
from typing import Any
from xmlrpc.client import Fault

import pytest
from supervisor.options import ClientOptions
from supervisor.supervisorctl import Controller, DefaultControllerPlugin

from broker import pool_ctl
from broker import protocol as p
from broker.errors import NotFound, Unavailable
from broker.status import Status
from tests.unit.broker.statuses import HOST, model, request, status, worker


class Supervisor:
    """supervisord's answers: workers that come back with another pid."""

    def __init__(self) -> None:
        self.pids = {"workers:worker0": 100, "workers:worker1": 101, "broker": 1}
        self.states = dict.fromkeys(self.pids, "RUNNING")
        self.calls: list[str] = []
        self.down = False
        self.comes_back = True

    def getAllProcessInfo(self) -> list[dict[str, Any]]:
        if self.down:
            raise FileNotFoundError("supervisor.sock")
        return [self.getProcessInfo(name) for name in self.pids]

    def getProcessInfo(self, name: str) -> dict[str, Any]:
        group, _, process = name.rpartition(":")
        return {
            "name": process, "group": group or process, "statename": self.states[name],
            "pid": self.pids[name], "stdout_logfile": "", "stderr_logfile": "",
        }  # fmt: skip

    def stopProcess(self, name: str) -> None:
        self.calls.append(f"stop {name}")
        if name == "workers:stuck":
            raise Fault(30, "FAILED")

    def startProcess(self, name: str, wait: bool) -> None:
        self.calls.append(f"start {name}")
        assert not wait  # RUNNING isn't ready: the broker is asked instead
        self.pids[name] += 1000
        self.states[name] = "RUNNING" if self.comes_back else "FATAL"


class Desk:
    """supervisorctl with the plugin, and what the broker says and was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.supervisor = Supervisor()
        self.told: list[p.AdminMessage] = []
        self.broker_down = False
        self.fields: dict[str, Any] = {"models": [model()]}
        options = ClientOptions()
        options.prompt = "loadonce"
        options.plugin_factories = [
            ("default", DefaultControllerPlugin, {}),
            ("pool", pool_ctl.make_pool_controller, {}),
        ]
        self.out = io.StringIO()
        self.controller = Controller(options, stdout=self.out)
        self.controller.output = lambda text: self.out.write(f"{text}\n")
        self.controller.get_supervisor = lambda: self.supervisor
        monkeypatch.setattr(pool_ctl, "ask_status", self._status)
        monkeypatch.setattr(pool_ctl, "ask", self._ask)
        monkeypatch.setattr("socket.gethostname", lambda: HOST)
        monkeypatch.setattr(pool_ctl, "RATE_S", 0.0)
        monkeypatch.setattr(pool_ctl, "POLL_S", 0.0)

    def run(self, line: str) -> str:
        """What a command prints."""
        self.out.seek(0)
        self.out.truncate()
        self.controller.exitstatus = 0
        self.controller.onecmd(line)
        return self.out.getvalue()

    @property
    def exit_status(self) -> int:
        return int(self.controller.exitstatus)

    def _status(self, *_: object, **__: object) -> Status:
        if self.broker_down:
            raise Unavailable("no broker answers")
        pids = self.supervisor.pids
        registered = [
            worker(name, pid=pids[f"workers:{name}"])
            for name in ("worker0", "worker1")
            if self.supervisor.states[f"workers:{name}"] == "RUNNING"
        ]
        return status(*registered, **self.fields)

    def _ask(self, message: p.AdminMessage, **_: object) -> tuple[str, list[bytes]]:
        if self.broker_down:
            raise Unavailable("no broker answers")
        if getattr(message, "worker", "") == "nobody":
            raise NotFound("worker: there is no 'nobody'")
        self.told.append(message)
        return "so be it", []


VERBS = ["status ", "top ", "requests ", "drain ", "resume ", "restart ", "cancel "]


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_status_shows_workers_models_and_totals(desk: Desk) -> None:
    shown = desk.run("pool status")
    assert "worker0" in shown and "worker1" in shown and "MODEL" in shown and "in flight 0" in shown
    assert "NOT SERVING" not in shown
    assert desk.exit_status == 0


def test_status_names_what_does_not_serve(desk: Desk) -> None:
    desk.supervisor.states["workers:worker1"] = "FATAL"
    shown = desk.run("pool status")
    assert "NOT SERVING" in shown and "workers:worker1  FATAL" in shown


def test_status_without_a_broker_still_shows_supervisord_s_side(desk: Desk) -> None:
    desk.broker_down = True
    desk.supervisor.states["broker"] = "BACKOFF"
    shown = desk.run("pool status")
    assert "broker       BACKOFF" in shown and "no broker answers" in shown and "LOADING" not in shown
    assert desk.exit_status == 7


def test_status_without_supervisord_still_shows_the_broker_s_side(desk: Desk) -> None:
    desk.supervisor.down = True
    shown = desk.run("pool status")
    assert "worker0" in shown and "supervisord isn't running" in shown


def test_drain_resume_and_cancel_are_told_to_the_broker(desk: Desk) -> None:
    assert desk.run("pool drain worker0 worker1") == "so be it\nso be it\n"
    desk.run("pool resume worker0")
    desk.run("pool cancel r1")
    assert desk.told == [
        p.AdminDrain(worker="worker0"), p.AdminDrain(worker="worker1"), p.AdminResume(worker="worker0"),
        p.AdminCancel(id="r1"),
    ]  # fmt: skip


def test_a_refusal_is_one_line_and_an_exit_status(desk: Desk) -> None:
    assert desk.run("pool drain nobody") == "pool drain: worker: there is no 'nobody'\n"
    assert desk.exit_status == 1


def test_restart_goes_one_at_a_time_each_ready_before_the_next(desk: Desk) -> None:
    shown = desk.run("pool restart")
    assert desk.supervisor.calls == [
        "stop workers:worker0", "start workers:worker0", "stop workers:worker1", "start workers:worker1"
    ]  # fmt: skip
    assert shown.count("ready again") == 2 and desk.exit_status == 0


def test_restart_of_one_leaves_the_others(desk: Desk) -> None:
    desk.run("pool restart worker1")
    desk.run("pool restart workers:worker1")
    assert set(desk.supervisor.calls) == {"stop workers:worker1", "start workers:worker1"}
    assert len(desk.supervisor.calls) == 4


def test_restart_stops_at_a_worker_that_does_not_come_back(desk: Desk) -> None:
    desk.supervisor.comes_back = False
    shown = desk.run("pool restart")
    assert desk.supervisor.calls == ["stop workers:worker0", "start workers:worker0"]
    assert "worker0 doesn't start" in shown and "the others were left alone" in shown
    assert desk.exit_status == 7


def test_restart_gives_up_after_its_timeout(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.controller.options.plugins[1], "_registered", lambda pid: False)
    assert "wasn't ready after 0.1 s" in desk.run("pool restart --timeout 0.1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pool", "which verb?"),
        ("pool dance", "'dance' isn't one of its verbs"),
        ("pool status now", "'now' is too much"),
        ("pool drain", "WORKER is missing"),
        ("pool top soon", "'soon' isn't a number of seconds"),
        ("pool restart --timeout", "--timeout wants a number"),
        ("pool restart gpu9", "gpu9: no such worker"),
        ('pool drain "', "No closing quotation"),
    ],
)
def test_a_command_that_cannot_be_meant_says_why(desk: Desk, line: str, said: str) -> None:
    assert said in desk.run(line)
    assert desk.exit_status == 1 and desk.told == [] and desk.supervisor.calls == []


def test_requests_says_how_many_more_there_are(desk: Desk) -> None:
    assert desk.run("pool requests") == "nothing waits or runs\n"
    desk.fields.update(requests=[request("abc")], in_flight=5)
    shown = desk.run("pool requests")
    assert "abc" in shown and "and 4 more" in shown


def test_help_is_given_once_and_other_help_stays(desk: Desk) -> None:
    assert desk.run("help pool") == pool_ctl.HELP + "\n"
    assert desk.run("help tail").startswith("tail [-f] <name>")
    assert "pool" in desk.run("help")


@pytest.mark.parametrize(
    ("line", "text", "matches"),
    [
        ("po", "po", ["pool "]),
        ("pool ", "", VERBS),
        ("pool re", "re", ["requests ", "resume ", "restart "]),
        ("pool drain ", "", ["worker0 ", "worker1 "]),
        ("pool restart worker0 w", "w", ["worker1 "]),
        ("pool cancel a", "a", ["abc "]),
        ("pool status ", "", []),
    ],
)  # fmt: skip
def test_completion(desk: Desk, line: str, text: str, matches: list[str]) -> None:
    desk.fields["requests"] = [request("abc")]
    found = [desk.controller.complete(text, state, line) for state in range(len(matches) + 1)]
    assert found == [*matches, None]


def test_completion_without_a_broker_offers_nothing(desk: Desk) -> None:
    desk.broker_down = True
    assert desk.controller.complete("", 0, "pool drain ") is None


def test_the_section_takes_no_settings() -> None:
    with pytest.raises(ValueError, match="takes no setting colour"):
        pool_ctl.make_pool_controller(None, colour="red")
