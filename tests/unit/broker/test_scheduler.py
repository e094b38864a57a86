"""The broker's core, event by event: who gets what, what happens when somebody dies, who is told."""

from __future__ import annotations

import json

import pytest

from broker import protocol as p
from broker.errors import ProtocolError
from broker.scheduler import GAP_S
from tests.unit.broker.stage import Stage, chunk, outcome, request

# ── an undisturbed request ───────────────────────────────────────────────────────────────────────────


def test_a_request_goes_to_a_worker_with_its_bytes_and_ends_with_the_worker_s_name() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a", model="m")
    ((work, body),) = stage.work(gpu)
    assert (work.request_id, body) == ("a", [request("a")])
    stage.clock.advance(0.5)
    stage.worker(gpu, p.Done(work.id), outcome())
    done = stage.end_of("a")
    assert isinstance(done, p.Done) and (done.worker, done.attempts, done.queued_ms) == ("gpu0", 1, 0)


def test_a_stream_is_forwarded_and_its_done_carries_the_outcome_only() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a", stream=True)
    id = stage.one_work(gpu)
    stage.worker(gpu, p.Chunks([id], [1]), chunk(0))
    assert stage.heard() == [(p.Chunks(["a"]), [chunk(0)])]
    stage.worker(gpu, p.Done(id), outcome())
    assert [body for _, body in stage.heard()] == [[outcome()]]


def test_without_streaming_all_chunks_come_behind_the_outcome() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    id = stage.one_work(gpu)
    for start in range(3):
        stage.worker(gpu, p.Chunks([id], [1]), chunk(start))
    assert stage.heard() == []
    stage.worker(gpu, p.Done(id), outcome(3))
    assert [body for _, body in stage.heard()] == [[outcome(3), chunk(0), chunk(1), chunk(2)]]


def test_one_step_for_many_becomes_one_message_per_client() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0", slots=4)
    for client, id in ((b"c", "a"), (b"d", "a"), (b"c", "b")):
        stage.submit(id, client=client, stream=True)
    ids = [work.id for work, _ in stage.work(gpu)]
    stage.worker(gpu, p.Chunks(ids, [1, 1, 1]), b"1", b"2", b"3")
    assert stage.heard(b"c") == [(p.Chunks(["a", "b"]), [b"1", b"3"])]
    assert stage.heard(b"d") == [(p.Chunks(["a"]), [b"2"])]


def test_a_delimiter_is_answered_in_kind() -> None:
    stage = Stage()
    stage.scheduler.on_client(b"c", p.Ping(), [], True, stage.clock.now)
    ((_, _, frames),) = stage.scheduler.take()
    assert frames[0] == b"" and len(frames) == 2


# ── which worker, and when ───────────────────────────────────────────────────────────────────────────


def test_c65_a_worker_never_has_more_in_hand_than_its_slots() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0", slots=2)
    for n in range(100):
        stage.submit(f"r{n}")
    assert len(stage.work(gpu)) == 2
    assert len(stage.scheduler.life.queues["m"]) == 98


def test_a_freed_slot_is_filled_at_once() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    stage.submit("b")
    first = stage.one_work(gpu)
    stage.worker(gpu, p.Done(first), outcome())
    assert [work.request_id for work, _ in stage.work(gpu)] == ["b"]


def test_workers_of_different_models_get_their_own() -> None:
    stage = Stage()
    one, two = stage.ready("one", "m1"), stage.ready("two", "m2")
    stage.submit("a", model="m2")
    stage.submit("b", model="m1-alias")
    stage.submit("c")
    assert [work.request_id for work, _ in stage.work(two)] == ["a"]
    assert [work.request_id for work, _ in stage.work(one)] == ["b"]
    assert stage.scheduler.life.queues["m1"].count == 1, "the default model is the first registered"


def test_a_model_that_nobody_has_served_is_not_found_at_once() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.pass_time(5, gpu)
    stage.submit("a", model="nonesuch")
    end = stage.end_of("a")
    assert isinstance(end, p.Failed) and (end.code, end.param) == ("model_not_found", "model")
    assert "nonesuch" in end.message


def test_start_up_order_does_not_matter() -> None:
    stage = Stage()
    stage.submit("a", model="m-alias")
    stage.submit("b")
    stage.pass_time(3)
    gpu = stage.ready("gpu0", slots=2)
    assert [work.request_id for work, _ in stage.work(gpu)] == ["a", "b"]


def test_another_model_s_worker_may_come_a_little_later() -> None:
    stage = Stage()
    stage.ready("gpu0", "m1")
    stage.submit("a", model="m2")
    assert stage.heard() == []
    gpu1 = stage.ready("gpu1", "m2")
    assert len(stage.work(gpu1)) == 1


def test_without_any_worker_a_request_waits_a_little_and_is_then_unavailable() -> None:
    stage = Stage(no_worker_wait_s=3)
    stage.submit("a")
    stage.pass_time(2.5)
    assert stage.heard() == []
    stage.pass_time(1)
    end = stage.end_of("a")
    assert isinstance(end, p.Failed) and end.code == "unavailable" and end.retry_after_ms


def test_when_the_last_worker_has_left_new_requests_wait_for_it_to_come_back() -> None:
    stage = Stage(no_worker_wait_s=3)
    gpu = stage.ready("gpu0")
    stage.pass_time(10, gpu)
    stage.worker(gpu, p.Leave())
    stage.submit("a", model="m")
    stage.pass_time(1)
    gpu = stage.ready("gpu0")
    assert len(stage.work(gpu)) == 1


# ── admission ────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_queue_refuses_with_a_hint_from_the_rate_at_which_requests_end() -> None:
    stage = Stage(queue_limit=100)
    gpu = stage.ready("gpu0")
    for n in range(101):
        stage.submit(f"r{n}")
    stage.submit("over")
    end = stage.end_of("over")
    assert isinstance(end, p.Failed) and end.code == "overloaded" and end.retry_after_ms == 1000
    for n in range(50):  # four a second
        (work,) = stage.work(gpu)
        stage.worker(gpu, p.Done(work[0].id), outcome())
        stage.submit(f"again{n}")
        stage.pass_time(0.25, gpu)
    stage.heard()
    stage.submit("over")
    end = stage.end_of("over")
    assert isinstance(end, p.Failed) and end.retry_after_ms is not None
    assert 2000 <= end.retry_after_ms <= 3200, "a tenth of a hundred at four a second"


def test_bytes_are_bounded_as_well_as_requests() -> None:
    stage = Stage(queue_mib=1)
    stage.ready("gpu0")
    stage.submit("a")
    stage.submit("b", body=bytes(700_000))
    stage.submit("c", body=bytes(700_000))
    end = stage.end_of("c")
    assert isinstance(end, p.Failed) and end.code == "overloaded" and "1 MiB" in end.message


def test_a_full_queue_without_workers_is_unavailable() -> None:
    stage = Stage(queue_limit=1)
    stage.submit("a")
    stage.submit("b")
    end = stage.end_of("b")
    assert isinstance(end, p.Failed) and end.code == "unavailable" and end.retry_after_ms


def test_a_client_s_own_bound_refuses_it_and_nobody_else() -> None:
    stage = Stage(client_limit=2)
    stage.ready("gpu0")
    for id in ("a", "b", "c"):
        stage.submit(id)
    end = stage.end_of("c")
    assert isinstance(end, p.Failed) and end.code == "overloaded"
    stage.submit("c", client=b"d")
    assert stage.heard(b"d") == []


def test_what_was_begun_under_another_broker_gets_in_beside_a_full_queue_but_not_without_bound() -> None:
    stage = Stage(queue_limit=2)
    for id in ("a", "b"):
        stage.submit(id)
    for id in ("c", "d"):
        stage.submit(id, chunk(0))
    assert stage.heard() == []
    stage.submit("e", chunk(0))
    assert isinstance(stage.end_of("e"), p.Failed)


def test_an_unknown_version_is_refused_with_the_versions() -> None:
    stage = Stage()
    stage.submit("a", version=99)
    end = stage.end_of("a")
    assert isinstance(end, p.Failed) and end.code == "protocol_version" and "99" in end.message


def test_a_submit_without_a_request_names_the_field() -> None:
    stage = Stage()
    stage.client(p.Submit(id="a"))
    end = stage.end_of("a")
    assert isinstance(end, p.Failed) and (end.code, end.param) == ("invalid_request", "request")


# ── ends that somebody asked for ─────────────────────────────────────────────────────────────────────


def test_a_cancelled_request_ends_once_and_frees_its_slot() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    stage.submit("b")
    id = stage.one_work(gpu)
    stage.client(p.Cancel("a"))
    end = stage.end_of("a")
    assert isinstance(end, p.Failed) and end.code == "cancelled"
    told = [message for message, _ in stage.told(gpu)]
    assert p.CancelWork([id]) in told and any(isinstance(m, p.Work) for m in told)
    stage.worker(gpu, p.Done(id), outcome())
    assert stage.heard() == [] and stage.scheduler.metrics.stray == 1


def test_cancelling_what_is_not_there_says_nothing() -> None:
    stage = Stage()
    stage.client(p.Cancel("a"))
    assert stage.heard() == []


def test_an_expired_request_never_reaches_a_worker() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    stage.submit("b", deadline_ms=2000)
    stage.pass_time(2.5, gpu)
    end = stage.end_of("b")
    assert isinstance(end, p.Failed) and end.code == "deadline_exceeded" and "waited" in end.message
    assert [work.request_id for work, _ in stage.work(gpu)] == ["a"]


def test_a_deadline_that_passes_while_it_runs_stops_the_worker() -> None:
    stage = Stage(default_deadline_s=2)
    gpu = stage.ready("gpu0")
    stage.submit("a")
    id = stage.one_work(gpu)
    stage.pass_time(2.5, gpu)
    assert isinstance(stage.end_of("a"), p.Failed)
    assert p.CancelWork([id]) in [message for message, _ in stage.told(gpu)]


def test_an_error_of_the_worker_reaches_the_client_as_it_is() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    id = stage.one_work(gpu)
    stage.worker(gpu, p.Failed("context_length_exceeded", "too long", id, param="prompt"))
    assert stage.end_of("a") == p.Failed("context_length_exceeded", "too long", "a", param="prompt")
    assert stage.told(gpu) == [], "it knows that the request is over"


def test_submitting_an_id_again_replaces_it_and_stops_the_old_attempt() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0", slots=2)
    stage.submit("a", stream=True)
    first = stage.one_work(gpu)
    stage.worker(gpu, p.Chunks([first], [1]), chunk(0))
    stage.submit("a", chunk(0), stream=True)
    told = stage.told(gpu)
    assert p.CancelWork([first]) in [message for message, _ in told]
    ((work, body),) = [(m, b) for m, b in told if isinstance(m, p.Work)]
    assert body == [request("a"), chunk(0)]
    stage.heard()
    stage.worker(gpu, p.Chunks([first], [1]), chunk(1))
    assert stage.heard() == [], "what the old attempt still says is not heard"
    stage.worker(gpu, p.Done(work.id), outcome())
    assert isinstance(stage.end_of("a"), p.Done)


# ── clients that go ──────────────────────────────────────────────────────────────────────────────────


def test_a_client_that_pinged_and_fell_silent_is_gone_within_five_seconds() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    id = stage.one_work(gpu)
    stage.client(p.Ping(pending=["a"]))
    stage.pass_time(5, gpu)
    assert p.CancelWork([id]) in [message for message, _ in stage.told(gpu)]
    assert stage.scheduler.life.in_flight.count == 0


def test_a_client_that_never_pings_may_wait_in_silence() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    stage.pass_time(60, gpu)
    assert stage.scheduler.life.in_flight.count == 1


def test_c62_what_an_unreachable_client_waited_for_is_dropped() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0", slots=2)
    stage.submit("a")
    stage.submit("b", client=b"d")
    stage.scheduler.on_client_gone(b"c", "no route", stage.clock.now)
    stage.settle()
    assert sum(isinstance(m, p.CancelWork) for m, _ in stage.told(gpu)) == 1
    assert list(stage.scheduler.life.in_flight.clients) == [b"d"]


def test_a_pong_names_what_the_broker_does_not_have() -> None:
    stage = Stage()
    stage.submit("a")
    stage.client(p.Ping(pending=["a", "b"], stamp=7))
    assert stage.heard() == [(p.Pong("session-a", ["b"], 7), [])]


# ── workers that go ──────────────────────────────────────────────────────────────────────────────────


def test_c71_a_dead_worker_s_requests_go_on_elsewhere_with_the_chunks_delivered() -> None:
    stage = Stage()
    old = stage.ready("gpu0", slots=3, pid=10)
    for id, stream in (("fresh", True), ("begun", True), ("whole", False)):
        stage.submit(id, stream=stream)
    ids = {work.request_id: work.id for work, _ in stage.work(old)}
    stage.worker(old, p.Chunks([ids["begun"], ids["whole"]], [1, 1]), chunk(0), chunk(0))
    new = stage.ready("gpu1", slots=3)
    stage.admin.gone(10, "", stage.clock.now)
    stage.settle()
    given = stage.work(new)
    bodies = {work.request_id: body[1:] for work, body in given}
    assert bodies == {"begun": [chunk(0)], "whole": [chunk(0)]}
    assert stage.scheduler.metrics.continuations == 2
    stage.worker(new, p.Chunks([work.id for work, _ in given], [1, 1]), chunk(1), chunk(1))
    assert [work.request_id for work, _ in stage.work(new)] == ["fresh"], "in quarantine until these spoke"


def test_late_output_of_a_worker_thought_dead_reaches_nobody_and_it_is_told_to_stop() -> None:
    stage = Stage()
    old, new = stage.ready("gpu0"), stage.ready("gpu1")
    stage.submit("a", stream=True)
    id = stage.one_work(old)
    stage.pass_time(5, new)
    assert len(stage.work(new)) == 1
    stage.told(old)
    stage.worker(old, p.Chunks([id], [1]), chunk(0))
    stage.worker(old, p.Done(id), outcome())
    assert stage.heard() == [] and stage.scheduler.metrics.stray == 2
    assert stage.told(old) == [(p.CancelWork([id]), [])]


def test_c70_a_silent_worker_s_requests_move_after_the_liveness_period() -> None:
    stage = Stage()
    stopped, healthy = stage.ready("gpu0"), stage.ready("gpu1", slots=4)
    stage.submit("a")
    assert len(stage.work(stopped)) == 1
    stage.pass_time(p.LIVENESS_S, healthy)
    assert stage.work(healthy) == []
    stage.pass_time(0.5, healthy)
    assert [work.request_id for work, _ in stage.work(healthy)] == ["a"]


def test_a_worker_whose_steps_stand_still_is_drained_and_its_requests_move() -> None:
    stage = Stage(stall_s=10)
    stalled, healthy = stage.ready("gpu0"), stage.ready("gpu1", slots=4)
    stage.submit("a")
    stage.told(stalled)
    for _ in range(45):
        stage.beat(stalled, steps=7)
        stage.pass_time(0.25, healthy)
    assert any(isinstance(m, p.Drain) for m, _ in stage.told(stalled))
    assert [work.request_id for work, _ in stage.work(healthy)] == ["a"]


def test_an_idle_worker_s_steps_may_stand_still() -> None:
    stage = Stage(stall_s=10)
    idle = stage.ready("gpu0")
    for _ in range(100):
        stage.beat(idle, steps=7)
        stage.pass_time(0.25)
    assert idle in stage.scheduler.life.workers


def test_a_request_that_took_down_two_workers_is_not_tried_again() -> None:
    stage = Stage()
    first, second, third = (stage.ready(f"gpu{n}", pid=n + 1) for n in range(3))
    stage.submit("poison")
    for worker, pid in ((first, 1), (second, 2)):
        assert len(stage.work(worker)) == 1
        stage.admin.gone(pid, "", stage.clock.now)
        stage.settle()
    end = stage.end_of("poison")
    assert isinstance(end, p.Failed) and end.code == "request_failed" and "2 workers" in end.message
    assert stage.work(third) == []


def test_work_that_never_reached_a_dead_worker_is_not_blamed_for_its_death() -> None:
    stage = Stage()
    workers = [stage.ready(f"gpu{n}", pid=n + 1) for n in range(4)]
    stage.submit("innocent")
    stage.admin.gone(1, "", stage.clock.now)  # the only death that it was there for
    for dead in workers[1:3]:
        (message,) = [frames for _, identity, frames in stage.scheduler.take() if identity == dead]
        stage.scheduler.on_worker_unroutable(dead, stage.clock.now, [message[0]])
    stage.settle()
    stage.worker(workers[3], p.Done(stage.one_work(workers[3])), outcome())
    assert isinstance(stage.end_of("innocent"), p.Done)


def test_output_clears_a_request_of_its_worker_s_death() -> None:
    stage = Stage()
    for n in range(4):
        worker = stage.ready(f"gpu{n}", pid=n + 1)
        if n == 0:
            stage.submit("a", stream=True)
        id = stage.one_work(worker)
        stage.worker(worker, p.Chunks([id], [1]), chunk(n))
        stage.admin.gone(n + 1, "", stage.clock.now)
        stage.settle()
    assert not any(isinstance(message, p.Failed) for message, _ in stage.heard())


def test_a_request_that_outlives_many_workers_ends_all_the_same() -> None:
    stage = Stage()
    stage.submit("a", stream=True)
    for n in range(16):
        worker = stage.ready(f"gpu{n}", pid=n + 1)
        stage.worker(worker, p.Chunks([stage.one_work(worker)], [1]), chunk(n))
        stage.admin.gone(n + 1, "", stage.clock.now)
        stage.settle()
    end = stage.end_of("a")
    assert isinstance(end, p.Failed) and end.code == "request_failed"


def test_suspects_are_tried_one_at_a_time_on_each_worker_so_that_the_innocent_are_cleared() -> None:
    stage = Stage()
    stage.ready("gpu0", slots=3, pid=10)
    for id in ("poison", "a", "b"):
        stage.submit(id)
    stage.admin.gone(10, "", stage.clock.now)
    stage.settle()
    next_one = stage.ready("gpu1", slots=3, pid=11)
    ((work, _),) = stage.work(next_one)
    assert work.request_id == "poison"
    stage.admin.gone(11, "", stage.clock.now)
    stage.settle()
    assert isinstance(stage.end_of("poison"), p.Failed)
    last = stage.ready("gpu2", slots=3, pid=12)
    for _ in ("a", "b"):
        stage.worker(last, p.Done(stage.one_work(last)), outcome())
    ends = [message for message, _ in stage.heard()]
    assert [type(end) for end in ends] == [p.Done, p.Done]


def test_streams_under_way_go_on_at_once_and_none_of_them_fails_for_the_one_that_is_poison() -> None:
    stage = Stage()
    ids: list[str] = []
    for n in range(3):
        worker = stage.ready(f"gpu{n}", slots=3, pid=n + 1)
        if n == 0:
            for id in ("poison", "a", "b"):
                stage.submit(id, stream=True)
        ids = [work.id for work, _ in stage.work(worker)]
        if n == 0:
            stage.worker(worker, p.Chunks(ids, [1, 1, 1]), *[chunk(0)] * 3)
        assert len(ids) == (3, 3, 1)[n], "under way at first; after a second death one at a time"
        if n < 2:
            stage.admin.gone(n + 1, "", stage.clock.now)
            stage.settle()
    stage.heard()
    stage.admin.gone(3, "", stage.clock.now)
    stage.settle()
    assert isinstance(stage.end_of("poison"), p.Failed)
    last = stage.ready("gpu3", slots=3, pid=4)
    for _ in ("a", "b"):
        stage.worker(last, p.Done(stage.one_work(last)), outcome())
    assert [type(end) for end, _ in stage.heard()] == [p.Done, p.Done]


def test_a_lone_stream_that_dies_twice_at_the_same_token_is_poison() -> None:
    stage = Stage()
    first, second = stage.ready("gpu0", pid=1), stage.ready("gpu1", pid=2)
    stage.submit("poison", stream=True)
    stage.worker(first, p.Chunks([stage.one_work(first)], [1]), chunk(0))
    for pid in (1, 2):
        stage.admin.gone(pid, "", stage.clock.now)
        stage.settle()
    end = [m for m, _ in stage.heard() if isinstance(m, p.Failed)]
    assert [m.code for m in end] == ["request_failed"]
    assert len(stage.work(second)) == 1


def test_handing_back_blames_nobody_and_goes_to_the_head_of_the_queue() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0", slots=2)
    for id in ("a", "b", "c"):
        stage.submit(id)
    ids = [work.id for work, _ in stage.work(gpu)]
    stage.worker(gpu, p.HandOff(ids))
    stage.worker(gpu, p.Leave())
    new = stage.ready("gpu0", slots=3)
    assert [work.request_id for work, _ in stage.work(new)] == ["a", "b", "c"]
    assert stage.scheduler.metrics.worker_deaths == 0
    assert all(job.deaths == 0 for job in stage.scheduler.life.in_flight.jobs())


def test_a_worker_that_hands_back_gets_nothing_more() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0", slots=2)
    stage.submit("a")
    stage.worker(gpu, p.HandOff([stage.one_work(gpu)]))
    stage.submit("b")
    assert stage.work(gpu) == []


def test_c63_a_second_worker_with_the_name_of_a_living_one_is_refused_with_the_reason() -> None:
    stage = Stage()
    stage.ready("gpu0", pid=10)
    stage.worker(b"other", p.Ready("gpu0", "cpu", "here", 11, 1, [p.ModelInfo("m", 1, 1)]))
    ((refusal, _),) = stage.told(b"other")
    assert isinstance(refusal, p.Failed) and "pid 10" in refusal.message and refusal.param == "name"
    stage.worker(b"other", p.Ready("gpu0", "cpu", "here", 11, 1, [p.ModelInfo("m", 1, 1)]))
    logged = [json.loads(line)["event"] for line in stage.log.getvalue().splitlines()]
    assert logged.count("worker_refused") == 1, "it asks again every second; the log need not say so"


def test_c63_the_name_is_free_one_liveness_period_after_a_silent_death() -> None:
    stage = Stage()
    stage.ready("gpu0", pid=10)
    stage.pass_time(p.LIVENESS_S + 0.5)
    stage.worker(b"other", p.Ready("gpu0", "cpu", "here", 11, 1, [p.ModelInfo("m", 1, 1)]))
    assert b"other" in stage.scheduler.life.workers


@pytest.mark.parametrize(("shared", "taken"), [(False, True), (True, False)])
def test_c60_two_workers_on_one_device_only_if_both_say_so(shared: bool, taken: bool) -> None:
    stage = Stage()
    stage.ready("gpu0", device_uuid="GPU-1", shared_device=shared)
    other = stage.ready("gpu1", device_uuid="GPU-1", shared_device=shared)
    refused = [m for m, _ in stage.told(other) if isinstance(m, p.Failed)]
    assert bool(refused) is taken


def test_models_need_names_of_their_own() -> None:
    stage = Stage()
    for models in (["m", "m"], [""]):
        infos = [p.ModelInfo(name, 1, 1) for name in models]
        stage.worker(b"w", p.Ready("gpu0", "cpu", "here", 1, 1, infos))
        ((refusal, _),) = stage.told(b"w")
        assert isinstance(refusal, p.Failed) and refusal.code == "invalid_request"


def test_c67_a_worker_that_is_not_registered_learns_the_session_and_to_register() -> None:
    stage = Stage()
    stage.beat(b"gpu0")
    (beat, _), (failed, _) = stage.told(b"gpu0")
    assert beat == p.BrokerBeat("session-a")
    assert isinstance(failed, p.Failed) and failed.code == "not_found"


def test_registering_again_gives_back_what_was_in_hand() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    first = stage.one_work(gpu)
    stage.ready("gpu0")
    again = stage.one_work(gpu)
    assert again != first
    assert stage.scheduler.metrics.worker_deaths == 0


def test_output_for_another_broker_s_work_never_fits() -> None:
    one, two = Stage(), Stage()
    two.scheduler.life._work_prefix = "other"
    ids = []
    for stage in (one, two):
        gpu = stage.ready("gpu0")
        stage.submit("a")
        ids.append(stage.one_work(gpu))
    assert ids[0] != ids[1]


# ── a broker that was paused ─────────────────────────────────────────────────────────────────────────


def test_c69_a_paused_broker_expires_nobody_when_it_wakes() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    stage.client(p.Ping(["a"]))
    stage.tick()
    stage.clock.advance(30)
    stage.tick()
    assert gpu in stage.scheduler.life.workers and stage.scheduler.life.in_flight.count == 1
    stage.pass_time(p.LIVENESS_S + 0.5)
    assert gpu not in stage.scheduler.life.workers, "silence after the pause counts"


def test_a_short_hiccup_of_ours_is_no_pause() -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.tick()
    for _ in range(4):
        stage.clock.advance(GAP_S)
        stage.tick()
    assert gpu not in stage.scheduler.life.workers


# ── wrong messages ───────────────────────────────────────────────────────────────────────────────────


def test_a_malformed_message_of_a_client_is_answered_and_counted() -> None:
    stage = Stage()
    stage.scheduler.on_malformed("client", b"c", ProtocolError("bad header"))
    stage.settle()
    assert stage.heard() == [(p.Failed("protocol_error", "bad header"), [])]
    assert stage.scheduler.metrics.malformed == 1


@pytest.mark.parametrize(
    ("message", "frames"),
    [(p.Chunks(["x"], [1]), 0), (p.Chunks(["x"], [1]), 2), (p.Chunks(["x"], [1, 2]), 1)],
)
def test_a_chunk_message_whose_parts_do_not_match_is_refused_whole(message: p.Chunks, frames: int) -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a", stream=True)
    message.ids[0] = stage.one_work(gpu)
    stage.worker(gpu, message, *[chunk(0)] * frames)
    stage.worker(gpu, message, *[chunk(0)] * frames)
    assert stage.heard() == [] and stage.scheduler.metrics.malformed == 2
    assert stage.log.getvalue().count('"malformed"') == 1, "each worker's first is logged"


@pytest.mark.parametrize("body", [(), (b"\xc1",), (p.encode({"finish_reason": "bored"}),)])
def test_a_done_without_an_outcome_ends_the_request_in_an_error(body: tuple[bytes, ...]) -> None:
    stage = Stage()
    gpu = stage.ready("gpu0")
    stage.submit("a")
    stage.worker(gpu, p.Done(stage.one_work(gpu)), *body)
    end = stage.end_of("a")
    assert isinstance(end, p.Failed) and end.code == "internal_error"


def test_prompts_count_where_tenants_are_compared_and_what_was_cached_does_not() -> None:
    """One tenant reads long prompts and writes a word, the other writes: both use the same device."""
    stage = Stage()
    gpu = stage.ready("gpu0")
    for n in range(12):
        stage.submit(f"r{n}", client=b"reader", tenant="reads", cost=1)
        stage.submit(f"w{n}", client=b"writer", tenant="writes", cost=1)
    begun: list[str] = []
    while works := stage.work(gpu):
        ((work, _),) = works
        begun.append(work.request_id[0])
        used = p.Usage(100, 1, cached_tokens=50) if begun[-1] == "r" else p.Usage(0, 10)
        if len(begun) == 12:
            break
        stage.worker(gpu, p.Chunks([work.id], [used.completion_tokens]), chunk(0, used.completion_tokens))
        stage.worker(gpu, p.Done(work.id), p.encode(p.Outcome("stop", used)))
    # 51 tokens for one that reads, 10 for one that writes.
    assert begun.count("w") == 10 and begun.count("r") == 2


def test_models_are_listed_with_their_ready_workers() -> None:
    stage = Stage()
    stage.ready("gpu0", "m1")
    stage.ready("gpu1", "m1", "m2")
    stage.admin.drain("gpu1", 0, leave=False)
    stage.client(p.ListModels())
    ((models, _),) = stage.heard()
    assert isinstance(models, p.Models)
    assert [(m.name, m.workers) for m in models.models] == [("m1", 1), ("m2", 0)]
