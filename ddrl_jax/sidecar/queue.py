"""The queue between the HTTP face and the workers: its interface, and the embedded one in this process's memory.

Knows nothing of HTTP, torch or Redis. `redis_queue.RedisQueue` is the same for a fleet.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .protocol import EnqueueHeader, Limits, one_line

MOST_PUSHED = 64  # scorers whose answers are kept for a uuid that was never enqueued

_UUID = re.compile(r"[0-9A-Za-z_-]{1,64}")


class QueueFullError(Exception):
    """No room now; come back later."""


class QueueDownError(Exception):
    """What keeps the queue cannot be reached now; come back later."""


@dataclass(eq=False)
class Task:
    """One request in a worker's hands. `asked`: the scorers without an answer; `enqueued`: Unix seconds."""

    uuid: str
    header: EnqueueHeader
    array: np.ndarray
    asked: list[str]
    enqueued: float
    entry: str = ""  # Redis' name of it


class Queue(Protocol):
    """Requests in, answers out. Every method may be called from any thread; all but `account` may block."""

    def add(self, header: EnqueueHeader, array: np.ndarray) -> str:
        """Queues a request and returns its uuid. QueueFullError, QueueDownError; ValueError for an unknown scorer."""

    def get(self, task_uuid: str, scorer: str | None) -> tuple[int, dict[str, Any]]:
        """(HTTP status, answer): 200 scores, 400 pending, 404 unknown uuid, 422 failed, or not asked of that scorer."""

    def put_answer(self, task_uuid: str, scorer: str, answer: dict[str, Any]) -> bool:
        """Scores computed elsewhere. False where there was an answer already: the first one stays.

        A uuid that is unknown here gets a record of its own. ValueError: no uuid, or a scorer not asked for.
        """

    def take(self, timeout: float) -> Task | None:
        """The next task, or None after `timeout` seconds without one."""

    def answer(self, task: Task, scorer: str, answer: dict[str, Any]) -> None:
        """Keeps a scorer's answer, unless there is one already."""

    def fail(self, task: Task, scorer: str, reason: str) -> bool:
        """Keeps the reason why a scorer has none; False where it has answered, or failed already."""

    def finish(self, task: Task) -> None:
        """The task is done with: its array goes, its answers stay for `Limits.result_seconds`."""

    def drain(self, seconds: float) -> None:
        """Waits until nothing would be lost by stopping, or the time is up."""

    def close(self) -> None:
        """Leaves."""

    @property
    def account(self) -> dict[str, Any]:
        """kind, pending (requests taken and not finished), bytes (of their arrays), oldest_seconds (of them), scored,
        failed (requests finished here), replicas (alive), reachable. Does not block."""


def open_queue(spec: str, limits: Limits, scorers: Iterable[str], codec: str = "", dead_seconds: float = 15.0) -> Queue:
    """The queue of `--queue`. Raises ValueError in one line.

    Args:
      spec: `embedded`, or the URL of a Redis: `redis://HOST:PORT/DATABASE`, `rediss://` (TLS) or `unix://PATH`.
      scorers: what a request may ask for. Replicas share their work with those of the same scorers and codec.
      codec: as on the command line.
      dead_seconds: a replica that is silent for so long is dead, and others take its work.
    """
    if spec == "embedded":
        return EmbeddedQueue(limits, scorers)
    if not spec.startswith(("redis://", "rediss://", "unix://")):
        scheme = one_line(spec.split("://")[0], 40)
        raise ValueError(
            f"queue: {scheme!r}; 'embedded', redis://HOST:PORT, rediss://HOST:PORT or unix://PATH is needed"
        )
    from .redis_queue import RedisQueue

    return RedisQueue(spec, limits, scorers, codec, dead_seconds)


def check_scorers(header: EnqueueHeader, scorers: Iterable[str]) -> None:
    """Raises ValueError where a request asks for a scorer that is not there."""
    for name in header.reward_fn:
        if name not in scorers:
            raise ValueError(f"reward_fn: this server has no scorer {name!r}; it has {', '.join(scorers)}")


def is_uuid(text: str) -> bool:
    return _UUID.fullmatch(text) is not None


def no_uuid(text: str) -> str:
    return f"uuid: {one_line(text, 80)!r}; 1 to 64 letters, digits, '-' or '_' are needed"


def full(pending: int, nbytes: int) -> QueueFullError:
    return QueueFullError(f"queue: {pending} requests ({nbytes} bytes) wait already; try again later")


UNKNOWN = (404, {"message": "uuid: unknown here; it was never enqueued, has expired, or was lost in a restart"})
PENDING = (400, {"message": "pending: not scored yet; ask again"})


def not_asked(scorer: str | None, names: Iterable[str]) -> str:
    return one_line(f"type: {scorer!r}; this request asked for {', '.join(names)}")


@dataclass(eq=False)
class _Record:
    """What is known of a request without its array. `pushed`: never enqueued, its answers came from elsewhere."""

    names: list[str]
    nbytes: int
    began: float  # monotonic seconds, as `finished`
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    finished: float | None = None
    collected: set[str] = field(default_factory=set)
    pushed: bool = False

    def open(self, scorer: str) -> bool:
        return scorer not in self.answers and scorer not in self.errors


class EmbeddedQueue:
    """In memory, for one process: what waits is lost with it."""

    def __init__(self, limits: Limits, scorers: Iterable[str]):
        self.limits, self.scorers = limits, tuple(scorers)
        self._changed = threading.Condition()
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._waiting: deque[Task] = deque()
        self._pending = self._bytes = self._scored = self._failed = 0

    def add(self, header: EnqueueHeader, array: np.ndarray) -> str:
        check_scorers(header, self.scorers)
        names = list(header.reward_fn)
        task = Task(uuid.uuid4().hex, header, array, names, time.time())
        with self._changed:
            room = self._bytes + array.nbytes <= self.limits.queue_bytes
            if self._pending >= self.limits.queue or (self._pending and not room):
                raise full(self._pending, self._bytes)
            self._pending += 1
            self._bytes += array.nbytes
            self._records[task.uuid] = _Record(list(names), array.nbytes, time.monotonic())
            self._waiting.append(task)
            self._expire()
            self._changed.notify_all()
        return task.uuid

    def get(self, task_uuid: str, scorer: str | None) -> tuple[int, dict[str, Any]]:
        with self._changed:
            record = self._records.get(task_uuid)
            if record is None:
                return UNKNOWN
            if scorer is None and len(record.names) == 1:
                scorer = record.names[0]
            if scorer not in record.names:
                return 422, {"message": not_asked(scorer, record.names)}
            if record.open(scorer):
                return PENDING
            record.collected.add(scorer)
            self._changed.notify_all()
            if scorer in record.answers:
                return 200, record.answers[scorer]
            return 422, {"message": record.errors[scorer]}

    def put_answer(self, task_uuid: str, scorer: str, answer: dict[str, Any]) -> bool:
        if not is_uuid(task_uuid):
            raise ValueError(no_uuid(task_uuid))
        with self._changed:
            record = self._records.get(task_uuid)
            if record is None:
                now = time.monotonic()
                record = self._records[task_uuid] = _Record([], 0, now, finished=now, pushed=True)
                self._expire()
            if scorer not in record.names:
                if not record.pushed or len(record.names) >= MOST_PUSHED:
                    raise ValueError(not_asked(scorer, record.names))
                record.names.append(scorer)
            if not record.open(scorer):
                return False
            record.answers[scorer] = answer
            return True

    def take(self, timeout: float) -> Task | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout):
                return None
            task = self._waiting.popleft()
            record = self._records[task.uuid]
            task.asked = [name for name in record.names if record.open(name)]
            return task

    def answer(self, task: Task, scorer: str, answer: dict[str, Any]) -> None:
        with self._changed:
            record = self._records[task.uuid]
            if record.open(scorer):
                record.answers[scorer] = answer

    def fail(self, task: Task, scorer: str, reason: str) -> bool:
        with self._changed:
            record = self._records[task.uuid]
            if not record.open(scorer):
                return False
            record.errors[scorer] = one_line(reason)
            return True

    def finish(self, task: Task) -> None:
        with self._changed:
            record = self._records[task.uuid]
            if record.finished is not None:
                return
            record.finished = time.monotonic()
            self._pending -= 1
            self._bytes -= record.nbytes
            self._failed += bool(record.errors)
            self._scored += not record.errors
            self._changed.notify_all()

    def drain(self, seconds: float) -> None:
        """Until every request is finished and its scores are collected: they go with this process."""

        def empty() -> bool:
            records = self._records.values()
            return not any(not r.pushed and (r.finished is None or r.collected < set(r.names)) for r in records)

        with self._changed:
            self._changed.wait_for(empty, seconds)

    def close(self) -> None:
        pass

    @property
    def account(self) -> dict[str, Any]:
        with self._changed:
            began = next((r.began for r in self._records.values() if r.finished is None), None)
            return {
                "kind": "embedded",
                "pending": self._pending,
                "bytes": self._bytes,
                "oldest_seconds": 0.0 if began is None else time.monotonic() - began,
                "scored": self._scored,
                "failed": self._failed,
                "replicas": 1,
                "reachable": True,
            }

    def _expire(self) -> None:
        done = [(key, r.finished) for key, r in self._records.items() if r.finished is not None]
        surplus, old = len(done) - self.limits.results, time.monotonic() - self.limits.result_seconds
        for i, (key, finished) in enumerate(done):
            if i < surplus or finished < old:
                del self._records[key]
