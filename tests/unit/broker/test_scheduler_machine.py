"""Any interleaving of clients, workers, deaths, stalls, restarts, cancels, deadlines; a model beside it.

The machine plays every peer honestly (a worker says only what its work makes it say, a client sends the
chunks that it has) and lets any of them die, stop, wake up, leave or start over at any moment, the broker
included. After every step the scheduler's integrity check runs; at the end all that was accepted must have
ended exactly once and nothing of it may be kept.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker import protocol as p
from broker.admin_server import AdminServer
from broker.errors import LoadOnceError, ProtocolError
from broker.lifecycle import Side
from broker.logs import Log
from broker.scheduler import Scheduler
from broker.settings import BrokerSettings
from broker.workers import Worker
from tests.clock import Clock

LENGTH = 3  # chunks of a whole answer
MODELS = ("m1", "m2")
NAMES = ("", "m1", "m1", "m1", "m1-alias", "m2", "m2", "nobody")
SETTINGS = BrokerSettings(
    queue_limit=7, client_limit=8, default_deadline_s=30, no_worker_wait_s=3, stall_s=5, affinity_tokens=8
)


def frame(request: str, start: int) -> bytes:
    """The chunk at a position of a request's only right answer."""
    return p.encode(p.Chunk(start=start, token_ids=[start], text=f"{request}:{start}"))


@dataclass
class Asked:
    """One request as its client sees it."""

    submit: p.Submit
    got: list[bytes] = field(default_factory=list)
    ended: str = ""  # how
    deaths: int = 0  # workers that died with it in hand

    @property
    def name(self) -> str:
        return self.submit.id


@dataclass
class Player:
    """A client."""

    identity: bytes
    asked: dict[str, Asked] = field(default_factory=dict)
    alive: bool = True
    pings: bool = False  # it has begun to, so it goes on
    refused: int = 0  # answers about messages that could not be decoded

    def pending(self) -> list[Asked]:
        return [asked for asked in self.asked.values() if not asked.ended]


@dataclass
class Hand:
    """One attempt in a worker's hand."""

    asked: str
    at: int


@dataclass
class Machine:
    """A worker. `stopped` is SIGSTOP: it neither hears nor says anything."""

    identity: bytes
    ready: p.Ready
    registered: bool = False
    stopped: bool = False
    stuck: bool = False  # beats go on, steps don't
    steps: int = 0
    inbox: list[tuple[p.BrokerToWorker, list[bytes]]] = field(default_factory=list)
    hand: dict[str, Hand] = field(default_factory=dict)


class BrokerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.players = [Player(f"client{n}".encode()) for n in range(3)]
        self.machines: dict[bytes, Machine] = {}
        self.lives = 0
        self.numbers = 0
        self.start_broker()

    # ── plumbing ─────────────────────────────────────────────────────────────────────────────────

    def start_broker(self) -> None:
        self.lives += 1
        log = Log("broker", stream=io.StringIO())
        self.scheduler = Scheduler(SETTINGS, f"life-{self.lives}", self.clock.now, log)
        self.admin = AdminServer(self.scheduler, self.clock.now, "here", 1)
        self.count_deaths()

    def count_deaths(self) -> None:
        """Count a worker's death for what it had in hand, to check who may end in `request_failed`."""
        lose = self.scheduler.life.lose

        def counted(
            worker: Worker, reason: str, now: float, *, blame: bool = True, spared: Set[str] = frozenset()
        ) -> None:
            for job in worker.jobs.values() if blame else ():
                player = self.player(job.client)
                if player is not None and job.work_id not in spared:
                    player.asked[job.submit.id].deaths += 1
            lose(worker, reason, now, blame=blame, spared=spared)

        self.scheduler.life.lose = counted  # type: ignore[method-assign]

    def settle(self) -> None:
        """Deliver to clients at once, to workers into their inboxes; the dead can't be reached."""
        self.scheduler.check()
        while out := self.scheduler.take():
            lost: dict[tuple[Side, bytes], list[bytes]] = defaultdict(list)  # headers
            for side, identity, frames in out:
                _, header, body = p.split(frames)
                if side == "client":
                    player = self.player(identity)
                    if player is not None:
                        self.client_hears(player, p.decode_header(p.to_client, header), list(body))
                    else:
                        lost[side, identity].append(header)
                elif identity in self.machines:
                    message = p.decode_header(p.to_worker, header)
                    self.machines[identity].inbox.append((message, list(body)))
                else:
                    lost[side, identity].append(header)
            for (side, identity), headers in lost.items():
                if side == "client":
                    self.scheduler.on_client_gone(identity, "no route", self.clock.now)
                else:
                    self.scheduler.on_worker_unroutable(identity, self.clock.now, headers)
            self.scheduler.check()

    def player(self, identity: bytes) -> Player | None:
        """The living client behind a routing id."""
        found = [player for player in self.players if player.identity == identity and player.alive]
        return found[0] if found else None

    def from_client(self, player: Player, message: p.ClientMessage, *body: bytes) -> None:
        self.scheduler.on_client(player.identity, message, body, False, self.clock.now)
        self.settle()

    def from_worker(self, machine: Machine, message: p.WorkerMessage, *body: bytes) -> None:
        self.scheduler.on_worker(machine.identity, message, body, self.clock.now)
        self.settle()

    # ── what clients check ───────────────────────────────────────────────────────────────────────

    def client_hears(self, player: Player, message: p.BrokerToClient, body: list[bytes]) -> None:
        match message:
            case p.Chunks():
                assert len(message.ids) == len(body)
                for id, got in zip(message.ids, body, strict=True):
                    self.hears_chunk(player, id, got)
            case p.Done():
                asked = self.still_open(player, message.id)
                if not asked.submit.stream:
                    asked.got = body[1:]
                assert asked.got == [frame(asked.name, n) for n in range(LENGTH)]
                asked.ended = "done"
            case p.Failed() if not message.id:
                player.refused += 1
            case p.Failed():
                asked = self.still_open(player, message.id)
                asked.ended = message.code
                if message.code == "request_failed":
                    assert asked.deaths >= SETTINGS.max_attempts, f"failed after {asked.deaths} deaths"
            case p.Pong():
                for id in message.unknown:
                    self.resubmit(player, player.asked[id])

    def hears_chunk(self, player: Player, id: str, got: bytes) -> None:
        asked = self.still_open(player, id)
        assert asked.submit.stream, f"{id} didn't ask for a stream"
        assert got == frame(id, len(asked.got)), f"{id} has {len(asked.got)} chunks and got {got!r}"
        asked.got.append(got)

    def still_open(self, player: Player, id: str) -> Asked:
        asked = player.asked[id]
        assert not asked.ended, f"{id} ended in {asked.ended} and hears more"
        return asked

    def resubmit(self, player: Player, asked: Asked) -> None:
        got = asked.got if asked.submit.stream else []
        body = [p.encode(p.Request(prompt=asked.name)), *got]
        self.scheduler.on_client(player.identity, asked.submit, body, False, self.clock.now)

    # ── clients act ──────────────────────────────────────────────────────────────────────────────

    @rule(
        who=st.integers(0, 2), model=st.sampled_from(NAMES), stream=st.booleans(), level=st.integers(4, 6),
        tenant=st.sampled_from("ab"), deadline=st.sampled_from([0, 0, 0, 2000]), blocks=st.integers(0, 2),
    )  # fmt: skip
    def submit(
        self, who: int, model: str, stream: bool, level: int, tenant: str, deadline: int, blocks: int
    ) -> None:
        player = self.players[who]
        self.numbers += 1
        submit = p.Submit(
            id=f"r{self.numbers}", model=model, stream=stream, tenant=tenant, priority=level,
            deadline_ms=deadline, cost=1 + self.numbers % 7, prefix=list(range(blocks)),
        )  # fmt: skip
        if not player.alive:
            player = self.players[who] = Player(f"new{self.numbers}".encode())
        player.asked[submit.id] = Asked(submit)
        self.from_client(player, submit, p.encode(p.Request(prompt=submit.id)))

    @rule(who=st.integers(0, 2), data=st.data())
    def submit_again(self, who: int, data: st.DataObject) -> None:
        player = self.players[who]
        if player.alive and player.pending():
            self.resubmit(player, data.draw(st.sampled_from(player.pending())))
            self.settle()

    @rule(who=st.integers(0, 2), data=st.data())
    def cancel(self, who: int, data: st.DataObject) -> None:
        player = self.players[who]
        if player.alive and player.asked:
            self.from_client(player, p.Cancel(data.draw(st.sampled_from(sorted(player.asked)))))

    @rule(who=st.integers(0, 2))
    def ping(self, who: int) -> None:
        player = self.players[who]
        if player.alive:
            player.pings = True
            self.from_client(player, p.Ping([asked.name for asked in player.pending()]))

    @precondition(lambda self: self.numbers % 3 == 0)
    @rule(who=st.integers(0, 2))
    def client_dies(self, who: int) -> None:
        player = self.players[who]
        player.alive = False
        for asked in player.pending():
            asked.ended = "nobody waits"
        player.asked = {}

    @rule(who=st.integers(0, 2))
    def client_sends_rubbish(self, who: int) -> None:
        player = self.players[who]
        if player.alive:
            player.refused = 0
            self.scheduler.on_malformed("client", player.identity, ProtocolError("rubbish"))
            self.settle()
            assert player.refused == 1

    # ── workers act ──────────────────────────────────────────────────────────────────────────────

    @initialize()
    def first_worker(self) -> None:
        self.worker_comes("w0", "m1", 2, shared=False)
        self.worker_comes("w1", "m1 m2", 2, shared=False)

    @rule(
        name=st.sampled_from(["w0", "w1", "w2"]), model=st.sampled_from([*MODELS, "m1 m2"]),
        slots=st.integers(1, 3), shared=st.booleans(),
    )  # fmt: skip
    def worker_comes(self, name: str, model: str, slots: int, shared: bool) -> None:
        self.numbers += 1
        identity = f"{name}/{self.numbers}".encode()
        infos = [p.ModelInfo(m, 100, 100, aliases=[f"{m}-alias"]) for m in model.split()]
        ready = p.Ready(
            name,
            "cuda:0",
            "here",
            self.numbers,
            slots,
            infos,
            device_uuid=f"GPU-{name}",
            shared_device=shared,
        )
        machine = self.machines[identity] = Machine(identity, ready)
        self.from_worker(machine, ready)

    def pick(self, data: st.DataObject, *, hears: bool = True) -> Machine | None:
        able = [m for m in self.machines.values() if not (hears and m.stopped)]
        return data.draw(st.sampled_from(able)) if able else None

    @rule(data=st.data())
    def worker_listens(self, data: st.DataObject) -> None:
        machine = self.pick(data)
        if machine is not None:
            self.listen(machine)

    def listen(self, machine: Machine) -> None:
        """A worker works through its inbox."""
        inbox, machine.inbox = machine.inbox, []
        for message, body in inbox:
            match message:
                case p.Work():
                    assert machine.registered, "work for a worker that isn't registered"
                    request = p.decode_request(body[0])
                    assert request.prompt == message.request_id
                    assert body[1:] == [frame(message.request_id, n) for n in range(len(body) - 1)]
                    machine.hand[message.id] = Hand(message.request_id, len(body) - 1)
                    assert len(machine.hand) <= machine.ready.slots, "more work than slots"
                case p.CancelWork():
                    for id in message.ids:
                        machine.hand.pop(id, None)
                case p.BrokerBeat():
                    machine.registered = True
                case p.Drain():
                    self.leave(machine)
                    return
                case p.Failed():
                    machine.registered = False
                    machine.hand.clear()
                    if message.code == "not_found" and not machine.inbox:
                        self.from_worker(machine, machine.ready)

    @rule(data=st.data(), how_many=st.integers(1, 3))
    def worker_steps(self, data: st.DataObject, how_many: int) -> None:
        machine = self.pick(data)
        if machine is not None:
            self.step(machine, how_many)

    @rule(steps=st.integers(1, 3))
    def all_work(self, steps: int) -> None:
        """What happens most of the time."""
        for _ in range(steps):
            for machine in [m for m in self.machines.values() if not m.stopped]:
                self.listen(machine)
                self.step(machine, machine.ready.slots)

    @rule(how_many=st.integers(1, 3))
    def all_work_a_little(self, how_many: int) -> None:
        for machine in [m for m in self.machines.values() if not m.stopped]:
            self.listen(machine)
            self.step(machine, how_many)

    def step(self, machine: Machine, how_many: int) -> None:
        """The model makes a step for some of what is in hand."""
        if machine.stuck or machine.identity not in self.machines:
            return
        machine.steps += 1
        ids = list(machine.hand)[:how_many]
        going_on = [id for id in ids if machine.hand[id].at < LENGTH]
        frames = [frame(machine.hand[id].asked, machine.hand[id].at) for id in going_on]
        for id in going_on:
            machine.hand[id].at += 1
        if going_on:
            self.from_worker(machine, p.Chunks(going_on, [1] * len(going_on)), *frames)
        for id in ids:
            if id in machine.hand and machine.hand[id].at >= LENGTH:
                del machine.hand[id]
                whole = p.Outcome(finish_reason="stop", usage=p.Usage(1, LENGTH))
                self.from_worker(machine, p.Done(id), p.encode(whole))

    @rule(data=st.data())
    def worker_beats(self, data: st.DataObject) -> None:
        machine = self.pick(data)
        if machine is not None:
            machine.steps += not machine.stuck
            self.from_worker(machine, p.WorkerBeat("", running=len(machine.hand), steps=machine.steps))

    @rule(data=st.data())
    def accident(self, data: st.DataObject) -> None:
        """One of all that may happen to a worker."""
        kinds = [
            self.worker_fails_one,
            self.worker_hands_back,
            self.worker_leaves,
            self.worker_dies,
            self.worker_stops,
            self.worker_wakes,
            self.worker_is_stuck,
            self.worker_sends_parts_that_do_not_match,
        ]
        data.draw(st.sampled_from(kinds))(data)

    @rule()
    def supervisor_starts_what_is_missing(self) -> None:
        for name, model in (("w0", "m1"), ("w1", "m1 m2")):
            if not any(m.ready.name == name and m.registered for m in self.machines.values()):
                self.worker_comes(name, model, 2, shared=False)

    def worker_fails_one(self, data: st.DataObject) -> None:
        machine = self.pick(data)
        if machine is not None and machine.hand:
            id = data.draw(st.sampled_from(sorted(machine.hand)))
            del machine.hand[id]
            self.from_worker(machine, p.Failed("out_of_memory", "no room", id))

    def worker_hands_back(self, data: st.DataObject) -> None:
        machine = self.pick(data)
        if machine is not None:
            ids = data.draw(st.lists(st.sampled_from([*sorted(machine.hand), "nonesuch"]), max_size=3))
            for id in ids:
                machine.hand.pop(id, None)
            self.from_worker(machine, p.HandOff(ids))

    def worker_leaves(self, data: st.DataObject) -> None:
        machine = self.pick(data)
        if machine is not None:
            self.leave(machine)

    def leave(self, machine: Machine) -> None:
        del self.machines[machine.identity]
        if machine.hand:
            self.from_worker(machine, p.HandOff(list(machine.hand)))
        self.from_worker(machine, p.Leave())

    def worker_dies(self, data: st.DataObject) -> None:
        machine = self.pick(data, hears=False)
        if machine is not None:
            del self.machines[machine.identity]
            if data.draw(st.booleans()):  # supervisord tells
                self.admin.gone(machine.ready.pid, "", self.clock.now)
                self.settle()

    def worker_stops(self, data: st.DataObject) -> None:
        machine = self.pick(data)
        if machine is not None:
            machine.stopped = True

    def worker_wakes(self, data: st.DataObject) -> None:
        machine = self.pick(data, hears=False)
        if machine is not None:
            machine.stopped = False

    @rule()
    def all_beat(self) -> None:
        for machine in [m for m in self.machines.values() if not m.stopped]:
            machine.steps += not machine.stuck
            self.from_worker(machine, p.WorkerBeat("", running=len(machine.hand), steps=machine.steps))

    def worker_is_stuck(self, data: st.DataObject) -> None:
        machine = self.pick(data)
        if machine is not None:
            machine.stuck = True

    def worker_sends_parts_that_do_not_match(self, data: st.DataObject) -> None:
        machine, frames = self.pick(data), data.draw(st.sampled_from([0, 2, 3]))
        if machine is not None:
            self.from_worker(machine, p.Chunks([*machine.hand, "x"][:1], [1]), *[b""] * frames)

    # ── admins and time ──────────────────────────────────────────────────────────────────────────

    @rule(data=st.data(), what=st.sampled_from(["drain", "drain and leave", "resume", "cancel"]))
    def admin_acts(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(["w0", "w1", "w2"]))
        number = data.draw(st.integers(1, max(self.numbers, 1)))
        match what:
            case "resume":
                self.by_admin(lambda: self.admin.resume(name, self.clock.now))
            case "cancel":
                self.by_admin(lambda: self.admin.cancel(f"r{number}", self.clock.now))
            case _:
                self.by_admin(lambda: self.admin.drain(name, 1000, leave="leave" in what))

    def by_admin(self, act: object) -> None:
        assert callable(act)
        try:
            act()
        except LoadOnceError as problem:
            assert problem.code in ("not_found", "unavailable")
        self.settle()

    @rule(seconds=st.sampled_from([0.0, 0.25, 0.25, 1.0, 1.4, 6.0]))
    def time_passes(self, seconds: float) -> None:
        """Six seconds at once is a broker that was paused."""
        self.clock.advance(seconds)
        self.scheduler.tick(self.clock.now)
        self.settle()
        for player in self.players:
            if player.alive and player.pings:
                self.from_client(player, p.Ping([asked.name for asked in player.pending()]))

    @precondition(lambda self: self.lives < 3 and self.numbers > 8 * self.lives)
    @rule()
    def broker_is_killed(self) -> None:
        """What it said is delivered; workers drop their work when they see the new one."""
        self.start_broker()
        for machine in self.machines.values():
            machine.inbox.clear()
            machine.registered = False
            machine.hand.clear()
        for player in self.players:
            if player.alive:
                self.from_client(player, p.Ping([asked.name for asked in player.pending()]))

    # ── what must always hold ────────────────────────────────────────────────────────────────────

    @invariant()
    def no_bound_is_passed(self) -> None:
        life = self.scheduler.life
        for queue in life.queues.values():
            fresh = sum(not job.begun for job in queue.jobs())
            assert fresh <= SETTINGS.queue_limit, f"{fresh} wait, {SETTINGS.queue_limit} may"

    @invariant()
    def what_clients_wait_for_is_in_flight(self) -> None:
        waited = {(pl.identity, asked.name) for pl in self.players if pl.alive for asked in pl.pending()}
        kept = {job.key for job in self.scheduler.life.in_flight.jobs() if self.player(job.client)}
        assert kept == waited, f"kept {kept - waited}, lost {waited - kept}"

    def teardown(self) -> None:
        """All deadlines pass: every request must have ended, and nothing of any may be kept."""
        for _ in range(int(SETTINGS.default_deadline_s) + 5):
            self.time_passes(1.0)
        for player in self.players:
            assert not player.pending(), f"{[asked.name for asked in player.pending()]} never ended"
        life = self.scheduler.life
        assert life.in_flight.count == 0 and not life.in_flight.clients and not life.queues
        assert not life.fairness.served and not life.in_flight._deadlines
        for worker in life.workers.values():
            assert not worker.jobs and worker.cost == 0 and not worker.suspects


TestBroker = BrokerMachine.TestCase
TestBroker.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
