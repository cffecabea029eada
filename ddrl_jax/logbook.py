"""What a run writes while it runs: metrics.jsonl, TensorBoard, W&B, and the console's progress bars and lines.

Only process 0 writes. metrics.jsonl holds each (stage, step) once: a resumed run first drops the lines of the steps it
is about to repeat. Knows nothing of training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def _number(value: Any) -> Any:
    """A JSON value: floats to seven digits; what is not finite becomes null, since JSON has no NaN."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    value = float(value)
    return float(f"{value:.7g}") if math.isfinite(value) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; what is none, such as a last line cut off by a kill, is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("stage"), str) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a kill leaves the old one or the new one, never half."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


LINE_EVERY_S = 60.0  # of progress, where no bar is drawn


class Logbook:
    """Metrics and console of one run. `every`: iterations a console line; `wandb`: a project's name, "" is off."""

    def __init__(
        self, workdir: Path, *, primary: bool = True, every: int = 1, tensorboard: bool = True, wandb: str = ""
    ) -> None:
        self.every = every
        self._path = workdir / "metrics.jsonl"
        self._primary = primary
        self.console = Console(stderr=False, soft_wrap=True, quiet=not primary, highlight=False)
        self._writer = self._wandb = None
        if primary and tensorboard:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(workdir / "tensorboard"))
        if primary and wandb:
            import wandb as wandb_module  # type: ignore[import-not-found]

            # The same workdir is the same run, so that a resumed one goes on in its own curves.
            identity = hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:16]
            self._wandb = wandb_module.init(
                project=wandb, dir=str(workdir), name=workdir.name, id=identity, resume="allow"
            )

    def say(self, text: str) -> None:
        """One line on the console, above the progress bar if there is one."""
        self.console.print(text, markup=False)

    def forget_from(self, stage: str, step: int) -> None:
        """Drops the lines of `stage` from `step` on: the steps a resumed run repeats. Atomic."""
        if not self._primary or not self._path.exists():
            return
        kept = [m for m in read_metrics(self._path) if m.get("stage") != stage or m["step"] < step]
        write_text(self._path, "".join(json.dumps(m) + "\n" for m in kept))

    def has(self, stage: str, step: int) -> bool:
        """Whether metrics.jsonl has the line of (stage, step)."""
        return any(m.get("stage") == stage and m["step"] == step for m in read_metrics(self._path))

    def write(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl and the same numbers to TensorBoard and W&B under `stage/`."""
        if not self._primary:
            return
        line = {"stage": stage, "step": step} | {name: _number(value) for name, value in metrics.items()}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        numbers = {f"{stage}/{n}": v for n, v in line.items() if isinstance(v, int | float) and n != "step"}
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers | {f"{stage}/step": step})

    @contextlib.contextmanager
    def progress(self, title: str, total: int, done: int = 0) -> Iterator[Any]:
        """A bar with elapsed time and ETA; yields `advance(n=1)`. Where the output is no terminal, a line a minute.

        A total of 0 is not known yet: `advance(done=n, total=m)` says where it stands.
        """
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            task = progress.add_task(title, total=total or None, completed=done)

            begin, first, said = time.monotonic(), done, time.monotonic()

            def go(n: int = 1, *, done: int | None = None, total: int | None = None) -> None:
                nonlocal said
                if done is None:
                    progress.advance(task, n)
                else:
                    progress.update(task, completed=done, total=total)
                now, at, end = time.monotonic(), progress.tasks[0].completed, progress.tasks[0].total
                if not self.console.is_terminal and now - said >= LINE_EVERY_S and end and at > first:
                    said = now
                    left = (now - begin) / (at - first) * (end - at) / 60
                    self.say(f"{title}: {at:.0f} of {end:.0f}, about {left:.0f} min left")

            yield go

    @contextlib.contextmanager
    def working(self, title: str) -> Iterator[None]:
        """A line before, and one after that says how long it took."""
        begin = time.perf_counter()
        self.say(title)
        yield
        self.say(f"{title}: {time.perf_counter() - begin:.0f} s")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()
