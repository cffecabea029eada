"""The queue and its one worker thread: a request is decoded once, piece by piece, and every scorer asked for sees each
piece. Knows nothing of HTTP."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .codec import Codec, to_video
from .protocol import EnqueueHeader, Limits, one_line

log = logging.getLogger("ddrl_jax.sidecar")

# Of decoded video at a time, one clip of 93 frames of 720p; a scorer's batch is a copy of as much again.
_PIECE_BYTES = 1 << 30


class QueueFullError(Exception):
    """No room now; come back later."""


@dataclass
class Task:
    """One request. `answers` fills scorer by scorer; `error` set means that it failed as a whole."""

    uuid: str
    header: EnqueueHeader
    array: np.ndarray | None  # dropped once scored
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    finished: float | None = None
    collected: set[str] = field(default_factory=set)


def score_in_fixed_batches(scorer: Any, video_BCTHW: np.ndarray, prompts: list[str]) -> dict[str, list[float]]:
    """Scores any number of samples in batches of exactly `scorer.batch_size`, the last one padded with its own samples.

    Kernels choose their summation order by shape, so one shape for all makes a score independent of its batch-mates.
    Raises ValueError where the scorer's answer is not name -> one number a sample.
    """
    import torch

    size = int(scorer.batch_size)
    total = len(prompts)
    scores: dict[str, list[float]] = {}
    for start in range(0, total, size):
        rows = np.minimum(np.arange(start, start + size), total - 1)
        videos = torch.from_numpy(np.ascontiguousarray(video_BCTHW[rows]))
        with torch.inference_mode():
            part = scorer.score(videos, [prompts[i] for i in rows])
        live = min(size, total - start)
        if not isinstance(part, dict) or not part:
            raise ValueError(f"it returned {type(part).__name__}, not a dict of scores")
        columns = {}
        for name, values in part.items():
            values = values.tolist() if hasattr(values, "tolist") else values
            if not isinstance(values, list | tuple) or len(values) != size:
                raise ValueError(f"{name}: {size} numbers are needed, it returned {values!r:.80}")
            columns[str(name)] = [float(v) for v in values[:live]]
        _extend(scores, columns)
    return scores


def _extend(scores: dict[str, list[float]], part: dict[str, list[float]]) -> None:
    """Adds the scores of the samples that follow. Raises ValueError where they are named otherwise."""
    if scores and set(part) != set(scores):
        raise ValueError(f"it named its scores {sorted(part)} here and {sorted(scores)} before")
    for name, values in part.items():
        scores.setdefault(name, []).extend(values)


class Worker:
    """Tasks in, scores out. All methods are safe to call from any thread."""

    def __init__(self, scorers: dict[str, Any], codec: Codec, limits: Limits):
        self.scorers, self.codec, self.limits = scorers, codec, limits
        self.scored = self.failed = 0
        self._lock = threading.Lock()
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._waiting: queue.Queue[Task] = queue.Queue()
        self._pending = self._pending_bytes = 0
        self._idle = threading.Condition(self._lock)
        threading.Thread(target=self._run, name="scorer", daemon=True).start()

    @property
    def pending(self) -> int:
        """Requests taken and not finished."""
        return self._pending

    def add(self, header: EnqueueHeader, array: np.ndarray) -> str:
        """Queues a request and returns its uuid. Raises QueueFullError, and ValueError for an unknown scorer."""
        for name in header.reward_fn:
            if name not in self.scorers:
                raise ValueError(f"reward_fn: this server has no scorer {name!r}; it has {', '.join(self.scorers)}")
        task = Task(uuid.uuid4().hex, header, array)
        with self._lock:
            room = self._pending_bytes + array.nbytes <= self.limits.queue_bytes
            if self._pending >= self.limits.queue or (self._pending and not room):
                raise QueueFullError(
                    f"queue: {self._pending} requests ({self._pending_bytes} bytes) wait already; try again later"
                )
            self._pending += 1
            self._pending_bytes += array.nbytes
            self._tasks[task.uuid] = task
            self._expire()
        self._waiting.put(task)
        return task.uuid

    def get(self, task_uuid: str, scorer: str | None) -> tuple[int, dict[str, Any]]:
        """(HTTP status, answer): 200 scores, 400 pending, 404 unknown uuid, 422 failed, or not asked of that scorer."""
        with self._lock:
            task = self._tasks.get(task_uuid)
            if task is None:
                return 404, {
                    "message": "uuid: unknown here; it was never enqueued, has expired, or was lost in a restart"
                }
            names = list(task.header.reward_fn)
            if scorer is None and len(names) == 1:
                scorer = names[0]
            if scorer not in names:
                return 422, {"message": one_line(f"type: {scorer!r}; this request asked for {', '.join(names)}")}
            if scorer in task.answers:
                task.collected.add(scorer)
                return 200, task.answers[scorer]
            if scorer in task.errors:
                task.collected.add(scorer)
                return 422, {"message": task.errors[scorer]}
            return 400, {"message": "pending: not scored yet; ask again"}

    def drain(self, seconds: float) -> None:
        """Waits until every request taken is finished and its scores are collected, or the time is up."""
        end = time.monotonic() + seconds
        with self._idle:
            while time.monotonic() < end:
                waiting = any(t.finished is None or t.collected < set(t.header.reward_fn) for t in self._tasks.values())
                if not waiting:
                    return
                self._idle.wait(0.05)

    def _expire(self) -> None:
        now, limits = time.monotonic(), self.limits
        done = [t for t in self._tasks.values() if t.finished is not None]
        surplus = len(done) - limits.results
        for i, task in enumerate(done):
            if i < surplus or now - (task.finished or now) > limits.result_seconds:
                del self._tasks[task.uuid]

    def _run(self) -> None:
        while True:
            task = self._waiting.get()
            assert task.array is not None
            nbytes = task.array.nbytes
            try:
                self._score(task, task.array)
            except BaseException as error:  # the one worker never dies, whatever a scorer raises
                log.error("request %s failed (%s)", task.uuid, type(error).__name__)
                reason = one_line(f"{type(error).__name__}: {error}")
                for name in task.header.reward_fn:
                    if name not in task.answers:
                        task.errors.setdefault(name, reason)
            with self._lock:
                task.array, task.finished = None, time.monotonic()
                self._pending -= 1
                self._pending_bytes -= nbytes
                self.failed += bool(task.errors)
                self.scored += not task.errors
                self._idle.notify_all()

    def _score(self, task: Task, array: np.ndarray) -> None:
        header, began = task.header, time.perf_counter()
        input_info = {
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "min": f"{array.min():.3f}",
            "max": f"{array.max():.3f}",
        }
        decoded, seconds = time.perf_counter() - began, dict.fromkeys(header.reward_fn, 0.0)
        columns: dict[str, dict[str, list[float]]] = {name: {} for name in header.reward_fn}
        # Whole batches of every scorer, so that none is filled up before the end.
        unit = math.lcm(*(int(self.scorers[name].batch_size) for name in header.reward_fn))
        total, start, end = len(header.prompts), 0, unit
        while start < total and len(task.errors) < len(columns):
            began = time.perf_counter()
            video = to_video(array[start:end], header.media_type, self.codec)
            decoded += time.perf_counter() - began
            for name in [n for n in columns if n not in task.errors]:
                began = time.perf_counter()
                try:
                    part = score_in_fixed_batches(self.scorers[name], video, header.prompts[start:end])
                    _extend(columns[name], part)
                except Exception as error:
                    # Prompts may be in the text: it goes back to whoever sent them, not into the log.
                    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                    task.errors[name] = one_line(f"scorer {name}: {text}")
                    log.warning("request %s: scorer %s failed (%s)", task.uuid, name, type(error).__name__)
                    continue
                seconds[name] += time.perf_counter() - began
                if end < total:
                    continue
                task.answers[name] = {
                    # JSON knows no NaN: null is a sample that could not be scored.
                    "scores": {
                        f"{name}/{key}": [v if math.isfinite(v) else None for v in column]
                        for key, column in columns[name].items()
                    },
                    "input_info": input_info,
                    "duration": f"{seconds[name]:.4f}",
                    "decoded_duration": f"{decoded:.4f}",
                    "type": name,
                }
                log.info(
                    "request %s: %s scored %d samples in %.3f s (decoded in %.3f s)",
                    task.uuid,
                    name,
                    total,
                    seconds[name],
                    decoded,
                )
            batch_bytes = video.nbytes // len(video) * unit
            start, end = end, end + unit * max(1, _PIECE_BYTES // batch_bytes)
            del video  # before the next piece is decoded
