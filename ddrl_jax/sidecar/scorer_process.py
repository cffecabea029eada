"""A scorer in an environment of its own: packages that contradict each other, or a network that may crash, stay apart.

`ScorerProcess` looks like any scorer to the worker. It starts `ENV/bin/python -m ddrl_jax.sidecar.scorer_process`,
gives it videos in shared memory without a name (nothing is left behind however either side ends) and reads answers as
JSON lines from a pipe:

    -> {"shape": [B,C,T,H,W], "prompts": [...], "infos": [...] or null}
    <- {"scores": {name: B numbers}} or {"error": line, "kind": the exception's name}

A process that dies or hangs is killed, started again, and the batch tried once more; if that fails too the request
fails, and another process is started for the next one. The child ends when its parent does: its standard input closes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import mmap
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from . import build
from .protocol import one_line, reason
from .settings import ScorerSettings

log = logging.getLogger("ddrl_jax.sidecar")

_STARTS_APART_S = 5.0  # a scorer that dies as soon as it starts is not started all the time


class ScorerDiedError(RuntimeError):
    """The scorer's process ended, or did not answer in time."""


def open_scorer(settings: ScorerSettings, weights: str, device: str, threads: int) -> tuple[str, Any]:
    """The scorer with its weights, here or in a process of its own, and its name on the wire.

    Args:
      weights, device: the server's, for a scorer that has none of its own.

    Raises:
      ValueError: one line, whatever the scorer raises.
    """
    weights, device = settings.weights or weights, settings.device or device
    if settings.env:
        scorer: Any = ScorerProcess(settings, weights, device, threads)
        return scorer.name, scorer
    from .scorers import load

    name, scorer = load(settings.name, weights or None, device, settings.dtype)
    if settings.batch_size:
        scorer.batch_size = settings.batch_size
    return name, scorer


def set_up_torch(threads: int) -> None:
    """Before any scorer is loaded: its threads, and the same scores for the same videos."""
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)


def open_scorers(settings: list[ScorerSettings], weights: str, device: str, threads: int) -> dict[str, Any]:
    """Name on the wire -> scorer. Raises ValueError as `open_scorer`, and where two have one name."""
    scorers: dict[str, Any] = {}
    for one in settings:
        name, scorer = open_scorer(one, weights, device, threads)
        if name in scorers:
            raise ValueError(f"scorer: two are named {name!r}")
        scorers[name] = scorer
    return scorers


def _shared_file() -> BinaryIO:
    """Memory that both processes map; it has no name, so that it goes when both are gone."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("ddrl_scorer"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)  # type: ignore[return-value]


class ScorerProcess:
    """A scorer behind a pipe. Made ready; `name`, `batch_size` and `wants_infos` are those of the scorer.

    Attributes:
      state: "ready", "restarting", or "dead" (it could not be started again; the next batch tries).
    """

    def __init__(self, settings: ScorerSettings, weights: str, device: str, threads: int):
        folder = build.default_env(settings.name) if settings.env == "own" else Path(settings.env).expanduser()
        python = Path(sys.executable) if settings.env == "this" else build.env_python(folder)
        if not python.exists():
            told = build.build_command(settings.name, folder)
            raise ValueError(f"scorer {settings.name}: there is no environment in {folder}; make it with: {told}")
        self._variables = build.child_environment(settings.env == "this")
        self._command = [str(python), "-m", "ddrl_jax.sidecar.scorer_process", "--scorer", settings.name]
        self._command += ["--weights", weights, "--device", device, "--dtype", settings.dtype]
        self._command += ["--batch-size", str(settings.batch_size), "--threads", str(threads)]
        self._timeout_s, self._label = settings.timeout_s, settings.name
        self._file = _shared_file()
        self._lock = threading.Lock()  # over the process and the shared memory
        self._process: subprocess.Popen[bytes] | None = None
        self._started = -np.inf
        self.state, self.starts = "restarting", 0
        ready = self._start()
        self.name, self.batch_size, self.wants_infos = ready["name"], int(ready["batch_size"]), ready["wants_infos"]

    def load(self, weights: str | None, device: str) -> None:
        """Has been done by its process."""

    def score(self, videos: Any, prompts: list[str], infos: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """As any scorer's. Raises ValueError where the scorer does, ScorerDiedError if its process died twice."""
        array = videos.numpy()
        request = {"shape": array.shape, "prompts": prompts, "infos": infos}
        with self._lock:
            for again in (True, False):
                try:
                    if self._process is None:
                        self._start()
                    answer = self._ask(array, request)
                    break
                except ScorerDiedError as error:
                    self._give_up(error)
                    if not again:
                        threading.Thread(target=self._revive, name="scorer-start", daemon=True).start()
                        raise
        if "error" in answer:
            raise ValueError(answer["error"]) if answer["kind"] == "ValueError" else RuntimeError(answer["error"])
        return answer["scores"]

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._stop()
            self._file.close()

    def _give_up(self, error: ScorerDiedError) -> None:
        self._stop()
        self.state = "dead"
        log.warning("scorer %s: %s", self._label, one_line(error), extra={"scorer": self._label})

    def _revive(self) -> None:
        """Starts it for whoever asks next, while nobody waits."""
        with self._lock:
            if self._process is None and not self._file.closed:
                try:
                    self._start()
                except ScorerDiedError as error:
                    self._give_up(error)

    def _start(self) -> dict[str, Any]:
        """Raises ValueError with the scorer's own words the first time, ScorerDiedError later."""
        self.state = "restarting" if self.starts else self.state
        time.sleep(max(0.0, self._started + _STARTS_APART_S - time.monotonic()))
        self._started, self.starts = time.monotonic(), self.starts + 1
        fd = self._file.fileno()
        process = subprocess.Popen(
            [*self._command, "--memory-fd", str(fd)], env=self._variables, pass_fds=[fd],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._process, self._lines = process, queue.SimpleQueue[bytes]()
        threading.Thread(target=self._read, args=(process, self._lines), name="scorer-pipe", daemon=True).start()
        try:
            ready = self._line(self._timeout_s)
        except ScorerDiedError:
            self._stop()
            if self.starts > 1:
                raise
            raise ValueError(f"scorer {self._label}: its process did not start (see above)") from None
        if "error" in ready:
            self._stop()
            raise ValueError(ready["error"]) if self.starts == 1 else ScorerDiedError(ready["error"])
        self.state = "ready"
        return ready

    @staticmethod
    def _read(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put(b"")

    def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ScorerDiedError(f"its process did not answer within {timeout_s:g} s") from None
        if not line:
            status = self._process.wait()
            raise ScorerDiedError(f"its process died ({'signal' if status < 0 else 'exit status'} {abs(status)})")
        return json.loads(line)

    def _ask(self, array: np.ndarray, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        self._file.truncate(array.nbytes)
        with mmap.mmap(self._file.fileno(), array.nbytes) as memory:
            shared = np.frombuffer(memory, np.float32).reshape(array.shape)
            shared[...] = array
            del shared  # a map with a view on it cannot be closed
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone: the line below says how
        answer = self._line(self._timeout_s)
        self._file.truncate(0)  # it has read them: a gigabyte need not lie there until the next batch
        return answer

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # what was not flushed has no reader any more
                process.stdin.close()


# --- the child ---


def _requests() -> queue.SimpleQueue[bytes]:
    """Lines of standard input. At its end the process ends at once, whatever the scorer is doing."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _answer(scorer: Any, request: dict[str, Any], fd: int) -> dict[str, Any]:
    import torch

    shape = request["shape"]
    with mmap.mmap(fd, int(np.prod(shape)) * 4) as memory:
        videos = torch.from_numpy(np.frombuffer(memory, np.float32).reshape(shape).copy())
    extra = [request["infos"]] if getattr(scorer, "wants_infos", False) else []
    with torch.inference_mode():
        scores = scorer.score(videos, request["prompts"], *extra)
    if not isinstance(scores, dict):
        raise ValueError(f"it returned {type(scores).__name__}, not a dict of scores")
    return {"scores": {str(name): [float(v) for v in values] for name, values in scores.items()}}


def main() -> None:
    p = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("scorer", "weights", "device", "dtype"):
        p.add_argument(f"--{name}", required=True)
    for name in ("batch-size", "threads", "memory-fd"):
        p.add_argument(f"--{name}", type=int, required=True)
    args = p.parse_args()
    # Whatever the scorer prints goes to stderr; the pipe carries answers only.
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lines = _requests()
    try:
        set_up_torch(args.threads)
        settings = ScorerSettings.model_validate(
            {"name": args.scorer, "dtype": args.dtype, "batch_size": args.batch_size}
        )
        name, scorer = open_scorer(settings, args.weights, args.device, args.threads)
    except (ValueError, ImportError) as error:
        print(json.dumps({"error": one_line(error)}), file=pipe)
        return
    wants_infos = bool(getattr(scorer, "wants_infos", False))
    print(json.dumps({"name": name, "batch_size": int(scorer.batch_size), "wants_infos": wants_infos}), file=pipe)
    while True:
        request = json.loads(lines.get())
        try:
            answer = _answer(scorer, request, args.memory_fd)
        except Exception as error:  # the scorer's own; the process goes on
            kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
            answer = {"error": one_line(reason(error)), "kind": kind}
        print(json.dumps(answer), file=pipe)


if __name__ == "__main__":
    main()
