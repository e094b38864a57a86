"""What an admin may ask, and what is answered."""

from __future__ import annotations

import msgspec
import pytest

from broker import protocol as p
from broker.errors import NotFound, Unavailable
from broker.status import Status
from tests.unit.broker.stage import Stage, chunk


def status_of(stage: Stage) -> Status:
    _, body = stage.admin.answer(p.AdminStatus(), stage.clock.now)
    return msgspec.msgpack.decode(body, type=Status)


def test_the_status_names_workers_models_queues_and_requests() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0", slots=1, pid=77)
    stage.submit("a", tenant="t", stream=True, cost=9)
    stage.worker(gpu, p.Chunks([stage.one_work(gpu)], [1]), chunk(0))
    stage.submit("b", tenant="u")
    stage.clock.advance(2)
    status = status_of(stage)
    (worker,), (model,) = status.workers, status.models
    assert (worker.name, worker.pid, worker.in_hand, worker.slots, worker.outstanding_tokens) == (
        "gpu0", 77, 1, 1, 9,
    )  # fmt: skip
    assert (model.name, model.ready, model.waiting, model.oldest_s, model.tenants) == ("m", 1, 1, 2, {"u": 1})
    assert [(r.id, r.state, r.worker, r.tokens) for r in status.requests] == [
        ("a", "running", "gpu0", 1),
        ("b", "queued", "", 0),
    ]
    assert (status.in_flight, status.clients, status.tokens) == (2, 1, 1)


def test_a_drained_worker_gets_nothing_new_until_it_is_resumed() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    assert "gpu0" in stage.admin.drain("gpu0", 0, leave=False)
    stage.submit("a")
    assert stage.told(gpu) == [(p.BrokerBeat("session-a"), [])], "it isn't told to go"
    stage.admin.resume("gpu0", stage.clock.now)
    stage.settle()
    assert len(stage.work(gpu)) == 1


def test_draining_to_leave_tells_the_worker_and_cannot_be_taken_back() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.admin.drain("gpu0", 1234, leave=True)
    stage.settle()
    assert (p.Drain(1234), []) in stage.told(gpu)
    with pytest.raises(Unavailable, match="leaving"):
        stage.admin.resume("gpu0", stage.clock.now)


def test_unknown_names_are_named() -> None:
    stage = Stage()
    for act in (
        lambda: stage.admin.drain("gpu9", 0, leave=False),
        lambda: stage.admin.resume("gpu9", stage.clock.now),
        lambda: stage.admin.cancel("gpu9", stage.clock.now),
    ):
        with pytest.raises(NotFound, match="gpu9"):
            act()


def test_an_operator_s_cancel_ends_the_request_for_its_client() -> None:
    stage = Stage()
    stage.submit("a")
    assert stage.admin.cancel("a", stage.clock.now) == "cancelled 1"
    stage.settle()
    end = stage.end_of("a")
    assert isinstance(end, p.Failed) and end.code == "cancelled" and "operator" in end.message


def test_a_process_that_exited_on_another_host_is_not_ours() -> None:
    stage = Stage()
    stage.worker(b"far", p.Ready("far", "cpu", "elsewhere", 10, 1, [p.ModelInfo("m", 1, 1)]))
    stage.ready("near", pid=10)
    assert "elsewhere" in stage.admin.gone(10, "", stage.clock.now)
    assert [worker.name for worker in stage.scheduler.life.workers.values()] == ["far"]
    assert stage.admin.gone(10, "", stage.clock.now) == "no such worker"


def test_the_metrics_read_as_prometheus_text() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    stage.submit("b")
    stage.worker(gpu, p.WorkerBeat("", steps=3, generated_tokens=5))
    header, text = stage.admin.answer(p.AdminMetrics(), stage.clock.now)
    assert isinstance(p.decode_header(p.to_admin, header), p.AdminReply)
    lines = text.decode().splitlines()
    assert "loadonce_broker_submitted_total 2.0" in lines
    assert 'loadonce_broker_waiting{model="m"} 1.0' in lines
    assert 'loadonce_worker_generated_tokens_total{model="m",worker="gpu0"} 5.0' in lines
    assert 'loadonce_broker_queue_seconds_bucket{le="+Inf"} 1.0' in lines
