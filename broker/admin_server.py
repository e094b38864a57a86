"""Answers to what an admin asks: from a decoded message to the frames of its reply. No socket."""

from __future__ import annotations

import os

from broker import protocol as p
from broker.exposition import exposition
from broker.scheduler import Scheduler
from broker.status import status


class AdminServer:
    """Carries out admin messages on a scheduler.

    Args:
        scheduler: the core.
        started: when the broker began, in monotonic seconds.
    """

    def __init__(self, scheduler: Scheduler, started: float) -> None:
        self._scheduler = scheduler
        self._started = started

    def answer(self, message: p.AdminMessage, now: float) -> list[bytes]:
        """The frames of the reply.

        Raises:
            LoadOnceError: the command can't be carried out; it says why.
        """
        body: list[bytes] = []
        said = ""
        match message:
            case p.AdminStatus():
                body = [p.encode(status(self._scheduler, self._started, os.getpid(), now))]
            case p.AdminMetrics():
                body = [exposition(self._scheduler, self._started, os.getpid(), now)]
            case p.AdminDrain():
                self._scheduler.on_drain(message.worker, message.grace_ms, message.exit)
                said = f"{message.worker} takes no new work"
            case p.AdminResume():
                self._scheduler.on_resume(message.worker, now)
                said = f"{message.worker} takes work"
            case p.AdminCancel():
                said = f"cancelled {self._scheduler.on_admin_cancel(message.id, now)}"
            case p.AdminGone():
                found = self._scheduler.on_gone(message.pid, message.worker, now)
                said = "its requests go on elsewhere" if found else "no such worker"
        return [p.encode(p.AdminReply(message=said)), *body]
