"""The sidecar's environment, seen from the trainer: is it there, and have it train a scorer's weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddrl_jax.sidecar.build import build_command, child_environment, default_env, env_python
from ddrl_jax.sidecar.protocol import one_line

from .client import ConfigurationFault


def interpreter(env: str, scorer: str) -> Path:
    """The Python of an environment folder; "" is the scorer's default one, "this" the running interpreter.

    Raises ConfigurationFault with the command that makes it when there is none.
    """
    if env == "this":
        return Path(sys.executable)
    folder = Path(env).expanduser() if env else default_env(scorer)
    python = env_python(folder)
    if not python.exists():
        raise ConfigurationFault(
            f"reward.env: there is no environment in {folder}; make it with: {build_command(scorer, folder)}"
        )
    return python


def check_environment(env: str, scorers: Sequence[str]) -> None:
    """Raises ConfigurationFault when the environment a sidecar would run in is not there. Starts nothing."""
    interpreter(env, next((s for s in scorers if ".py:" not in s), "digits"))


def train_scorer(
    scorer: str,
    *,
    env: str,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    log_path: str | os.PathLike[str],
    seed: int = 0,
) -> None:
    """Trains a scorer's weights from clips, in its environment. Raises ConfigurationFault with its last words."""
    command = [str(interpreter(env, scorer)), "-m", "ddrl_jax.sidecar", "train", "--scorer", scorer]
    command += ["--data", os.fspath(data), "--out", os.fspath(out), "--seed", str(seed)]
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command, env=child_environment(env == "this"), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    with open(log_path, "a") as log:
        log.write(done.stdout + done.stderr)
    if done.returncode:
        words = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        last = words[-1].removeprefix("ddrl_jax.sidecar: ") if words else f"exit status {done.returncode}"
        raise ConfigurationFault(f"reward.scorers: {scorer!r} could not be trained: {one_line(last, 400)}")
