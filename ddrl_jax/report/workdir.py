"""Reading a run's working directory, forgivingly.

A report must come out of a run that was killed, is still writing, or lost a file. Everything here
that cannot be read becomes a sentence in `Run.notes`, which the page shows; nothing raises for it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

LOSS_LIMIT = 0.10  # DDRL, sec. 4.2: a larger rise of the held-out loss alarms
IMAGE_LIMIT = 0.15  # a larger change of an image statistic alarms (docs/hacking.md)


@dataclasses.dataclass(frozen=True)
class Samples:
    """Clips of one evaluation: `video` uint8 (N, T, H, W, C) with C 1 or 3, one caption a clip."""

    step: int
    video: np.ndarray
    captions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a working directory holds; every part may be empty or None.

    `rows` are the lines of metrics.jsonl, each (stage, step) once and in order of step. `stopped` is what the hacking
    monitor left when it ended the run: step, action ("stop" or "rollback"), ended_at, reason.
    """

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    before: Samples | None
    after: Samples | None
    stopped: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def loss_limit(self) -> float:
        """The rise of the held-out loss that alarms, as a fraction: the run's own, else 0.1."""
        return self._limit("heldout_loss", "heldout_loss_limit") or LOSS_LIMIT

    @property
    def image_limit(self) -> float:
        """The relative change of an image statistic that alarms: the run's own, else 0.15."""
        return self._limit("image_statistics", "image_limit") or IMAGE_LIMIT

    def _limit(self, signal_name: str, field: str) -> float | None:
        signals = self.summary.get("signals")
        for signal in signals if isinstance(signals, list) else ():
            named = isinstance(signal, dict) and signal.get("name") == signal_name
            if named and (limit := number(signal.get("limit"))):
                return limit
        monitor = self.config.get("monitor")
        return number(monitor.get(field)) if isinstance(monitor, dict) else None

    def role(self, sub_score: str) -> str:
        """What training made of a sub-score: "reward", "gate", "none", or "unknown" without the run's weights.

        A weight on a whole scorer is a weight on its overall score, and so on what that is made of.
        """
        reward = self.config.get("reward")
        weights, gates = (reward.get(k) if isinstance(reward, dict) else None for k in ("weights", "gates"))
        if not isinstance(weights, dict) or not weights:
            return "unknown"
        scorer = sub_score.partition("/")[0]
        if any(weights.get(name) for name in (sub_score, scorer, f"{scorer}/overall")):
            return "reward"
        named = isinstance(gates, dict) and any(name in gates for name in (sub_score, scorer))
        return "gate" if named else "none"

    def stage(self, name: str) -> list[dict[str, Any]]:
        """The metrics rows of one stage ("pretrain", "ddrl", "eval"), in order of step."""
        return [row for row in self.rows if row.get("stage") == name]


def number(value: Any) -> float | None:
    """`value` as a finite float, or None for anything else (null, NaN, text, booleans)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def column(rows: Iterable[dict[str, Any]], key: str) -> np.ndarray:
    """One metric over rows as float64 (n,), NaN where a row does not have it."""
    values = (number(row.get(key)) for row in rows)
    return np.array([math.nan if v is None else v for v in values], np.float64)


def read_run(path: str | Path) -> Run:
    """Read a working directory; see the module's docstring for what happens to damage.

    Raises:
      ValueError: `path` is not a directory.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"workdir: {str(path)!r} is not a directory; give the one a run wrote")
    notes: list[str] = []
    rows = _read_metrics(path / "metrics.jsonl", notes)
    before, after = _read_samples(path / "eval", notes)
    return Run(
        path=path,
        config=_read_object(path / "config.json", notes),
        summary=_read_object(path / "summary.json", notes),
        rows=tuple(rows),
        before=before,
        after=after,
        stopped=_read_object(path / "stopped.json", notes),
        notes=tuple(notes),
    )


def short_labels(names: Iterable[str]) -> dict[str, str]:
    """Sub-scores' names -> labels: the last part, with the scorer before it where two scorers share that part."""
    tails = {name: name.rsplit("/", 1)[-1].replace("_", " ") for name in names}
    shown = list(tails.values())
    return {
        name: tail if shown.count(tail) == 1 or "/" not in name else f"{name.split('/', 1)[0]}: {tail}"
        for name, tail in tails.items()
    }


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} could not be read ({_short(error)}).")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} does not hold a JSON object.")
        return {}
    return value


def _read_metrics(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name} could not be read ({_short(error)}).")
        return []
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    broken = []
    for n, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            row = None
        step = number(row.get("step")) if isinstance(row, dict) else None
        if row is None or step is None or not isinstance(row.get("stage"), str):
            broken.append(n)
            continue
        # A run that was killed and resumed may have written a step twice: the later one is the
        # one whose parameters went on.
        rows[row["stage"], step] = row
    if broken:
        where = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
        lines = "1 line was" if len(broken) == 1 else f"{len(broken)} lines were"
        notes.append(f"{lines} left out of {path.name} as unreadable (line {where}).")
    return [rows[key] for key in sorted(rows, key=lambda key: key[1])]


def _read_samples(path: Path, notes: list[str]) -> tuple[Samples | None, Samples | None]:
    """Samples of the first and of the last evaluation; the same one is never given twice."""
    steps = []
    if path.is_dir():
        steps = sorted((int(d.name), d) for d in path.iterdir() if d.name.isdecimal() and d.is_dir())
    found = [s for step, folder in steps[:1] + steps[1:][-1:] if (s := _load(step, folder, notes))]
    before = next((s for s in found if s.step == steps[0][0]), None) if found else None
    after = next((s for s in found if s.step != steps[0][0]), None) if found else None
    return before, after


def _load(step: int, folder: Path, notes: list[str]) -> Samples | None:
    path = folder / "samples.npz"
    name = f"eval/{folder.name}/{path.name}"
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as data:
            video = data["video"]
            captions = data["caption"] if "caption" in data else np.array([""] * len(video))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        notes.append(f"{name} could not be read ({_short(error)}).")
        return None
    if video.dtype != np.uint8 or video.ndim != 5 or video.shape[-1] not in (1, 3) or 0 in (video.shape):
        notes.append(f"{name}: video is {video.dtype} {video.shape}; it must be uint8 (N, T, H, W, 1 or 3).")
        return None
    if captions.shape != (len(video),):
        notes.append(f"{name}: {captions.size} captions for {len(video)} clips; they are left out.")
        captions = np.array([""] * len(video))
    return Samples(step, video, tuple(map(str, captions)))


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 100 else text[:97] + "..."
