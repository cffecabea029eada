"""The one thread that scores: a request is decoded once, piece by piece, and every scorer asked for sees each piece.
Knows nothing of HTTP, nor of where its queue keeps things."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from .codec import Codec, to_video
from .protocol import EnqueueHeader, Limits, one_line, reason
from .queue import EmbeddedQueue, Queue, QueueDownError, QueueFullError, Task

__all__ = ["QueueFullError", "Worker", "score_in_fixed_batches"]

log = logging.getLogger("ddrl_jax.sidecar")

# Of decoded video at a time, one clip of 93 frames of 720p; a scorer's batch is a copy of as much again.
_PIECE_BYTES = 1 << 30


_THUMBNAIL = 128  # pixels of the longer side
_SHOWN = 4  # samples of a request among the recent ones


def score_in_fixed_batches(
    scorer: Any, video_BCTHW: np.ndarray, prompts: list[str], infos: list[dict[str, Any]] | None = None
) -> dict[str, list[float]]:
    """Scores any number of samples in batches of exactly `scorer.batch_size`, the last one padded with its own samples.

    Kernels choose their summation order by shape, so one shape for all makes a score independent of its batch-mates.
    A scorer with `wants_infos` gets what the request says of each video as well, nothing by default.
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
            more = [[infos[i] if infos else {} for i in rows]] if getattr(scorer, "wants_infos", False) else []
            part = scorer.score(videos, [prompts[i] for i in rows], *more)
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


def thumbnails(video_BCTHW: np.ndarray, most: int = _SHOWN) -> list[np.ndarray]:
    """The middle frames of the first clips in [-1,1], as uint8 (H,W,3) of at most 128 pixels a side."""
    import torch

    frames = torch.from_numpy(np.ascontiguousarray(video_BCTHW[:most, :, video_BCTHW.shape[2] // 2]))
    height, width = frames.shape[-2:]
    shrink = min(1.0, _THUMBNAIL / max(height, width))
    size = max(1, round(height * shrink)), max(1, round(width * shrink))
    small = torch.nn.functional.adaptive_avg_pool2d(frames, size)
    small = small if small.shape[1] == 3 else small.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    levels = ((small + 1) * 127.5).round().clamp(0, 255).byte()
    return list(np.ascontiguousarray(levels.permute(0, 2, 3, 1).numpy()))


class Worker:
    """Takes tasks from a queue and gives it their scores.

    Args:
      scorers: name -> loaded scorer.
      codec: what makes video of latents.
      limits: of the queue, where none is given.
      queue: None: an embedded one.

    Attributes:
      recent: (uuid, prompt, uint8 (H,W,3) thumbnail, score name -> number or None), newest last, of the last requests'
        first batches.
      timings: (time.monotonic() at its end, seconds from enqueue to scored, samples) of the last requests.
    """

    def __init__(self, scorers: dict[str, Any], codec: Codec, limits: Limits, queue: Queue | None = None):
        self.scorers, self.codec = scorers, codec
        self.queue: Queue = EmbeddedQueue(limits, scorers) if queue is None else queue
        self.add, self.get, self.drain = self.queue.add, self.queue.get, self.queue.drain
        self.recent: deque[tuple[str, str, np.ndarray, dict[str, float | None]]] = deque(maxlen=16)
        self.timings: deque[tuple[float, float, int]] = deque(maxlen=1024)
        self._account: dict[str, dict[str, Any]] = {
            name: {"state": "ready", "scored": 0, "failed": 0, "seconds": 0.0, "last_error": ""} for name in scorers
        }
        threading.Thread(target=self._run, name="scorer", daemon=True).start()

    @property
    def pending(self) -> int:
        """Requests taken and not finished."""
        return self.queue.account["pending"]

    @property
    def scored(self) -> int:
        return self.queue.account["scored"]

    @property
    def failed(self) -> int:
        return self.queue.account["failed"]

    @property
    def account(self) -> dict[str, dict[str, Any]]:
        """Of each scorer: state (ready, scoring), scored samples, failed requests, seconds, last_error (its kind)."""
        return {name: dict(fields) for name, fields in self._account.items()}

    def _run(self) -> None:
        task: Task | None
        while True:
            try:
                task = self.queue.take(1.0)
                if task is not None:
                    self._handle(task)
            except Exception as error:  # the queue's own: it must not end the one worker
                log.error("queue: %s: %s", type(error).__name__, one_line(error))
                time.sleep(1.0)
            task = None  # nor its array, while waiting for the next

    def _handle(self, task: Task) -> None:
        try:
            try:
                self._score(task)
            except QueueDownError:
                raise
            except BaseException as error:  # the one worker never dies, whatever a scorer raises
                log.error("request %s failed (%s)", task.uuid, type(error).__name__)
                for name in task.asked:
                    self._fail(task, name, f"{type(error).__name__}: {error}", error)
            self.queue.finish(task)
            took = max(0.0, time.time() - task.enqueued)
            self.timings.append((time.monotonic(), took, len(task.header.prompts)))
        except QueueDownError as error:  # whoever reaches the queue again takes it over
            log.error("request %s: its scores are lost: %s", task.uuid, error)

    def _fail(self, task: Task, name: str, reason: str, error: BaseException) -> None:
        if self.queue.fail(task, name, reason):
            self._account[name]["failed"] += 1
            self._account[name]["last_error"] = type(error).__name__

    def _score(self, task: Task) -> None:
        header, array, began = task.header, task.array, time.perf_counter()
        input_info = {
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "min": f"{array.min():.3f}",
            "max": f"{array.max():.3f}",
        }
        decoded, seconds = time.perf_counter() - began, dict.fromkeys(task.asked, 0.0)
        columns: dict[str, dict[str, list[float]]] = {name: {} for name in task.asked}
        failed: set[str] = set()
        answers: dict[str, dict[str, list[float | None]]] = {}
        shown: list[np.ndarray] = []
        # Whole batches of every scorer, so that none is filled up before the end.
        unit = math.lcm(*(int(self.scorers[name].batch_size) for name in task.asked))
        total, start, end = len(header.prompts), 0, unit
        while start < total and len(failed) < len(columns):
            began = time.perf_counter()
            video = to_video(array[start:end], header.media_type, self.codec)
            decoded += time.perf_counter() - began
            if start == 0:
                shown = thumbnails(video)
            for name in [n for n in columns if n not in failed]:
                began = time.perf_counter()
                try:
                    _extend(columns[name], self._ask(name, video, header, start, end))
                except Exception as error:
                    # Prompts may be in the text: it goes back to whoever sent them, not into the log.
                    about = {"request": task.uuid, "scorer": name, "error": type(error).__name__}
                    log.warning("request %s: scorer %s failed (%s)", *about.values(), extra=about)
                    self._fail(task, name, f"scorer {name}: {reason(error)}", error)
                    failed.add(name)
                    continue
                seconds[name] += time.perf_counter() - began
                self._account[name]["seconds"] += time.perf_counter() - began
                if end < total:
                    continue
                # JSON knows no NaN: null is a sample that could not be scored.
                answers[name] = {
                    f"{name}/{key}": [v if math.isfinite(v) else None for v in column]
                    for key, column in columns[name].items()
                }
                self.queue.answer(task, name, {
                    "scores": answers[name],
                    "input_info": input_info,
                    "duration": f"{seconds[name]:.4f}",
                    "decoded_duration": f"{decoded:.4f}",
                    "type": name,
                })  # fmt: skip
                self._account[name]["scored"] += total
                log.info(
                    "request %s: %s scored %d samples in %.3f s (decoded in %.3f s)",
                    task.uuid,
                    name,
                    total,
                    seconds[name],
                    decoded,
                    extra={"request": task.uuid, "scorer": name, "samples": total, "prompts": header.prompts},
                )
            batch_bytes = video.nbytes // len(video) * unit
            start, end = end, end + unit * max(1, _PIECE_BYTES // batch_bytes)
            del video  # before the next piece is decoded
        for i, thumbnail in enumerate(shown if answers else []):
            scores = {key: column[i] for part in answers.values() for key, column in part.items()}
            self.recent.append((task.uuid, header.prompts[i], thumbnail, scores))

    def _ask(self, name: str, video: np.ndarray, header: EnqueueHeader, start: int, end: int) -> dict[str, list[float]]:
        """A scorer's columns for the samples from `start` to `end`."""
        infos = header.video_infos[start:end] if header.video_infos else None
        self._account[name]["state"] = "scoring"
        try:
            return score_in_fixed_batches(self.scorers[name], video, header.prompts[start:end], infos)
        finally:
            self._account[name]["state"] = "ready"
