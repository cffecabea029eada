"""Starts the reward server as a child of the trainer, and sees to it that it goes when the trainer goes."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddrl_jax.sidecar.protocol import one_line

from .client import RewardClient
from .environment import ConfigurationFault, child_environment, interpreter
from .mixing import scorer_of

_TOKEN_VARIABLE = "DDRL_SIDECAR_TOKEN"


def launch(
    env: str = "",
    scorers: Mapping[str, float] | Iterable[str] = ("digits",),
    weights_dir: str | os.PathLike[str] = "",
    *,
    codec: str = "identity",
    text_encoder: str | os.PathLike[str] = "",
    text_tokenizer: str | os.PathLike[str] = "",
    text_length: int = 512,
    text_strategy: str = "full_concat",
    text_dtype: str = "bfloat16",
    port: int = 0,
    log_path: str | os.PathLike[str] = "",
    device: str = "cpu",
    threads: int = 1,
    startup_s: float = 600.0,
    max_relaunches: int = 3,
    keep_port: bool = False,
) -> Sidecar:
    """Starts a server on this machine and waits until it answers.

    Args:
      env: folder of the virtual environment that `sidecar build` made; "" is the default one of the first
        scorer, "this" the running interpreter.
      scorers: names or FILE.py:Class; of a mapping the keys, reduced to scorers ("digits/overall" is "digits").
      weights_dir: where the scorers load their weights from.
      codec: how latents become video, e.g. "unshuffle:factor=2,mean=-0.7,std=0.6".
      text_encoder: folder of a Qwen2.5-VL text tower, to embed captions with as well (see `text`); "": none.
      text_tokenizer: folder of its tokenizer; "": the tower's.
      text_length, text_strategy, text_dtype: tokens a caption, how hidden states become features, and what the tower
        computes in.
      port: 0 takes a free one, and another after a relaunch.
      log_path: the server's log, appended to; "" keeps it in a temporary file.
      device, threads: of torch.
      startup_s: most seconds until it answers.
      max_relaunches: how often `relaunch` may start it again in all.
      keep_port: a relaunch takes the same port again: other processes were told of it.

    Raises:
      ConfigurationFault (a ValueError), one line: no environment, torch missing in it, port taken, no weights,
        no such scorer.
    """
    names = list(dict.fromkeys(n if ".py:" in n else scorer_of(n) for n in scorers))
    if not names and not text_encoder:
        raise ConfigurationFault("reward.scorers: empty; name one, such as 'digits'")
    built = next((n for n in names if ".py:" not in n), "digits")
    python = interpreter(env, built)
    command = [str(python), "-m", "ddrl_jax.sidecar", "serve", "--weights", os.fspath(weights_dir)]
    for name in names:
        command += ["--scorer", name]
    command += ["--codec", codec, "--port", str(port), "--token-env", _TOKEN_VARIABLE]
    if text_encoder:
        command += ["--text-encoder", os.fspath(text_encoder), "--text-tokenizer", os.fspath(text_tokenizer)]
        command += ["--text-length", str(text_length), "--text-strategy", text_strategy, "--text-dtype", text_dtype]
    command += ["--device", device, "--threads", str(threads), "--parent-pid", str(os.getpid())]
    command += ["--grace", "4"]
    sidecar = Sidecar(command, child_environment(env), os.fspath(log_path), startup_s, max_relaunches)
    sidecar._start()
    if keep_port:
        sidecar._command[sidecar._command.index("--port") + 1] = str(urlsplit(sidecar.url).port)
    return sidecar


class Sidecar:
    """A running server. A context manager; `close` is also called when the interpreter exits.

    `url` may change after `relaunch`; `token` is drawn once. `generation` counts the starts.
    """

    def __init__(self, command: list[str], env: dict[str, str], log_path: str, startup_s: float, max_relaunches: int):
        self.token = secrets.token_urlsafe(32)
        self._url, self._generation = "", 0
        self.relaunches_left = max_relaunches
        self._command, self._startup_s = command, startup_s
        self._env = {**env, _TOKEN_VARIABLE: self.token}
        self._scratch = tempfile.TemporaryDirectory(prefix="ddrl_sidecar_")
        self.log_path = Path(log_path) if log_path else Path(self._scratch.name) / "sidecar.log"
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    # Under the lock, so that who asks during a relaunch gets the new server's.

    @property
    def url(self) -> str:
        with self._lock:
            return self._url

    @property
    def generation(self) -> int:
        with self._lock:
            return self._generation

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def alive(self, wait_s: float = 0.0) -> bool:
        """Whether the process is there (it may hang all the same), and still is after `wait_s` seconds."""
        with self._lock:
            process = self._process
        if process is None:
            return False
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def client(self, reward_fn: Mapping[str, float], **options: Any) -> RewardClient:
        """A client of this server, which relaunches it when it dies or hangs. Options as `RewardClient`."""
        return RewardClient(self.url, self.token, reward_fn, sidecar=self, **options)

    def relaunch(self, generation: int | None = None) -> str:
        """Stops what is left of the server and starts it again. Returns what happened, in a few words.

        Does nothing when it was started since `generation` already (several batches fail over one death),
        after `close`, and when `max_relaunches` is used up. Never raises.
        """
        with self._lock:
            if self._closed:
                return "the sidecar is closed"
            if generation is not None and generation != self._generation and self.alive():
                return ""
            if self.relaunches_left < 1:
                return f"the sidecar is not started again: no relaunch left (log: {self.log_path})"
            self.relaunches_left -= 1
            self._stop(graceful=False)
            try:
                self._start()
            except ValueError as error:
                return f"its relaunch failed: {error}"
            return f"the sidecar was relaunched ({self.relaunches_left} relaunches left)"

    def close(self) -> None:
        """SIGTERM to the process group, SIGKILL after five seconds. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                atexit.unregister(self.close)
                self._stop(graceful=True)
                self._scratch.cleanup()

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        ready = Path(self._scratch.name) / f"ready{self._generation}.json"
        command = [*self._command, "--ready-file", str(ready)]
        started = threading.Event()

        def keep(log: Any) -> None:
            # The kernel's parent-death signal fires when the *thread* that made the child ends: this one outlives it.
            try:
                self._process = subprocess.Popen(
                    command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self._failure = one_line(error)
            finally:
                log.close()
                started.set()
            if self._process is not None:
                self._process.wait()

        self._process, self._failure = None, ""
        log = open(self.log_path, "ab")  # noqa: SIM115 (closed by the thread, once the child has it)
        begin = log.tell()
        threading.Thread(target=keep, args=(log,), name="sidecar", daemon=True).start()
        started.wait()
        self._generation += 1
        atexit.unregister(self.close)
        atexit.register(self.close)
        deadline = time.monotonic() + self._startup_s
        while self._process is not None:
            if ready.exists():
                fields = json.loads(ready.read_text())
                self._url = f"http://{fields['host']}:{fields['port']}"
                return
            if not self.alive() or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        died = not self.alive()
        self._stop(graceful=False)
        if self._process is None:
            raise ConfigurationFault(f"reward.env: {command[0]} cannot be run ({self._failure})")
        why = self._last_line(begin)
        if not died:
            raise ConfigurationFault(
                f"reward.launch: the sidecar did not answer within {self._startup_s:g} s; its last words: {why}"
            )
        raise ConfigurationFault(f"reward: the sidecar did not start: {why}")

    def _last_line(self, begin: int) -> str:
        with open(self.log_path, "rb") as log:
            log.seek(begin)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        prefix = "ddrl_jax.sidecar: "
        own = [line for line in lines if line.startswith(prefix)]
        if own:
            return one_line(own[-1].removeprefix(prefix), 600)
        return one_line(lines[-1] if lines else "none", 400)

    def _stop(self, *, graceful: bool) -> None:
        process = self._process
        if process is None:
            return
        if graceful and process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        # The group outlives its leader if a scorer has started processes of its own.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
