"""The sidecar's environment, seen from the trainer: is it there, and have it train a scorer's weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ddrl_jax.sidecar.protocol import one_line


class ConfigurationFault(ValueError):
    """The user's to mend; asking again would not help."""


# What `sidecar build` does, said again: of the sidecar this side knows the protocol only. A test compares the two.


def default_env(scorer: str) -> Path:
    """Where `sidecar build` puts an environment unless told otherwise."""
    return Path.home() / ".cache" / "ddrl_jax" / "sidecar" / scorer


def build_command(scorer: str, env: str | os.PathLike[str]) -> str:
    """What a user types to make the environment."""
    return f"python -m ddrl_jax.sidecar build --scorer {scorer} --env {env}"


def env_python(env: str | os.PathLike[str]) -> Path:
    """The interpreter of a virtual environment."""
    return Path(env) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def child_environment(env: str) -> dict[str, str]:
    """Variables for the child. Another interpreter has its own link to the package and must not see our packages."""
    variables = dict(os.environ)
    variables.setdefault("OMP_NUM_THREADS", "1")
    old = variables.pop("PYTHONPATH", "")
    if env == "this":
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), old)))
    return variables


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
    for link in folder.glob("lib/python*/site-packages/ddrl_jax"):
        if link.is_symlink() and link.resolve() != Path(__file__).resolve().parents[1]:
            raise ConfigurationFault(
                f"reward.env: {folder} is linked to another copy of ddrl_jax, {link.resolve().parent}; link it to this "
                f"one with: {build_command(scorer, folder)}"
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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Trains a scorer's weights from clips, in its environment; `progress(done, total)` is told how far it is.

    Raises ConfigurationFault with its last words.
    """
    command = [str(interpreter(env, scorer)), "-m", "ddrl_jax.sidecar", "train", "--scorer", scorer]
    command += ["--data", os.fspath(data), "--out", os.fspath(out), "--seed", str(seed)]
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    words = ""
    with (
        open(log_path, "a") as log,
        subprocess.Popen(
            command,
            env=child_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("progress "):
                done, total = line.removeprefix("progress ").split("/")
                progress(int(done), int(total))
                continue
            log.write(line)
            words = line.strip() or words
    if process.returncode:
        last = words.removeprefix("ddrl_jax.sidecar: ") or f"exit status {process.returncode}"
        raise ConfigurationFault(f"reward.scorers: {scorer!r} could not be trained: {one_line(last, 400)}")
