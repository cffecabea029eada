"""`sidecar score`: rates pictures and videos from the command line, without a server, into a CSV file.

One row a file: file, prompt, a column for each sub-score (`scorer/name`), error. What cannot be rated has a reason in
`error` and no scores; the others are not held up by it.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .codec import Identity, to_video
from .protocol import one_line, reason

_PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
_VIDEOS = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".gif"}
_PENDING_BYTES = 1 << 30  # of video held at a time


@dataclass
class Sample:
    """A file on its way. `video` is uint8 (C,T,H,W), dropped once rated."""

    file: Path
    prompt: str = ""
    video: np.ndarray | None = None
    fps: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def find_files(paths: Iterable[str]) -> list[Path]:
    """The pictures and videos of folders (all below them), and files by name. Raises ValueError where there is none."""
    found: dict[Path, None] = {}
    for text in paths:
        path = Path(text)
        if path.is_dir():
            inside = [f for f in path.rglob("*") if f.suffix.lower() in _PICTURES | _VIDEOS and f.is_file()]
            found.update(dict.fromkeys(sorted(inside, key=_natural)))
        elif path.is_file():
            found[path] = None
        else:
            raise ValueError(f"files: there is no {text!r}")
    if not found:
        raise ValueError(f"files: no picture or video in {', '.join(map(repr, paths))}")
    return list(found)


def _natural(path: Path) -> list[tuple[int, str]]:
    """clip2 before clip10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def read_prompts(source: str, files: list[Path]) -> dict[Path, str]:
    """The prompt of each file that has one.

    Args:
      source: `beside` (NAME.txt beside the file), `none` (all empty), or a CSV file with columns `file` (as given, or
        the name alone, or relative to the CSV's folder) and `prompt`.

    Raises:
      ValueError: no such CSV, or it lacks a column.
    """
    if source == "none":
        return dict.fromkeys(files, "")
    if source == "beside":
        beside = {file: file.with_suffix(".txt") for file in files}
        return {file: " ".join(txt.read_text().split()) for file, txt in beside.items() if txt.is_file()}
    try:
        with open(source, newline="") as stream:
            rows = list(csv.DictReader(stream))
    except OSError as error:
        raise ValueError(f"prompts: {source!r} cannot be read ({error.strerror}); a CSV, beside or none") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"prompts: {source!r} is no CSV ({error})") from None
    if not rows or not {"file", "prompt"} <= set(rows[0]):
        raise ValueError(f"prompts: {source!r} needs a first line with the columns file and prompt, and rows")
    told = {row["file"]: row["prompt"] or "" for row in rows}
    by_path = {(Path(source).parent / name).resolve(): prompt for name, prompt in told.items()}
    prompts = {}
    for file in files:
        for prompt in (told.get(str(file)), by_path.get(file.resolve()), told.get(file.name)):
            if prompt is not None:
                prompts[file] = prompt
                break
    return prompts


def read_video(file: Path, frames: int = 0) -> tuple[np.ndarray, float]:
    """uint8 (3,T,H,W) and frames a second; a picture has one frame and 0.

    Args:
      frames: at most so many, evenly chosen; 0: all. The rate is then that of the chosen ones.

    Raises:
      ValueError: the file cannot be read.
    """
    if file.suffix.lower() in _PICTURES:
        from PIL import Image, ImageOps

        try:
            with Image.open(file) as picture:
                rgb = np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"cannot be read as a picture: {error}") from None
        return rgb.transpose(2, 0, 1)[:, None], 0.0
    import av

    try:
        with av.open(str(file)) as container:
            if not container.streams.video:
                raise ValueError("has no video")
            stream = container.streams.video[0]
            fps = float(stream.average_rate or 0)
            wanted = None
            if frames:
                count = stream.frames or sum(1 for _ in container.decode(stream))
                wanted = set(np.linspace(0, count - 1, min(frames, count)).round().astype(int).tolist())
                fps *= len(wanted) / max(count, 1)
                container.seek(0)
            kept = [
                frame.to_ndarray(format="rgb24")
                for i, frame in enumerate(container.decode(stream))
                if wanted is None or i in wanted
            ]
    except av.error.FFmpegError as error:
        raise ValueError(f"cannot be read as a video: {error.strerror}") from None
    if not kept:
        raise ValueError("cannot be read as a video: it has no frames")
    return np.stack(kept).transpose(3, 0, 1, 2), fps


def rate(samples: list[Sample], scorers: dict[str, Any]) -> None:
    """Fills in the scores of samples of one shape, or why there are none."""
    live = [s for s in samples if s.video is not None]
    if live:
        video = to_video(np.stack([s.video for s in live if s.video is not None]), "video", Identity())
        for name, scorer in scorers.items():
            _ask(name, scorer, video, live)
    for sample in samples:
        sample.video = None


def _ask(name: str, scorer: Any, video_BCTHW: np.ndarray, samples: list[Sample]) -> None:
    """All at once; if that fails, each by itself, so that only those to blame have no scores."""
    from .worker import score_in_fixed_batches

    prompts, infos = [s.prompt for s in samples], [{"video_fps": s.fps} for s in samples]
    try:
        columns = score_in_fixed_batches(scorer, video_BCTHW, prompts, infos)
    except Exception as error:  # whatever a scorer raises
        if len(samples) == 1:
            samples[0].errors.append(one_line(f"{name}: {reason(error)}"))
        else:
            for i, sample in enumerate(samples):
                _ask(name, scorer, video_BCTHW[i : i + 1], [sample])
        return
    for i, sample in enumerate(samples):
        sample.scores |= {f"{name}/{key}": column[i] for key, column in columns.items()}


def batches(files: list[Path], prompts: dict[Path, str], frames: int, size: int) -> Iterator[list[Sample]]:
    """Files in order, as runs of one shape of at most `size` samples (fewer, where they are large)."""
    run: list[Sample] = []
    for file in files:
        sample = Sample(file, prompts.get(file, ""))
        if file not in prompts:
            sample.errors.append("no prompt")
        else:
            try:
                sample.video, sample.fps = read_video(file, frames)
            except ValueError as error:
                sample.errors.append(one_line(error))
        shapes = {s.video.shape for s in (*run, sample) if s.video is not None}
        held = sum(s.video.nbytes * 4 for s in run if s.video is not None)
        if run and (len(shapes) > 1 or len(run) >= size or held >= _PENDING_BYTES):
            yield run
            run = []
        run.append(sample)
    if run:
        yield run


class Table:
    """The CSV, written as rows come. Its columns are those of the first sample with scores; earlier rows wait."""

    def __init__(self, stream: TextIO):
        self._stream, self._waiting = stream, list[Sample]()
        self._writer: csv.DictWriter[str] | None = None

    def add(self, samples: list[Sample]) -> None:
        self._waiting += samples
        names = {name: None for sample in samples if not sample.errors for name in sample.scores}
        if self._writer is None and names:
            self._start(list(names))
        if self._writer is not None:
            self._flush()

    def close(self) -> None:
        if self._writer is None:
            self._start(list({name: None for sample in self._waiting for name in sample.scores}))
        self._flush()

    def _start(self, names: list[str]) -> None:
        self._names = names
        self._writer = csv.DictWriter(self._stream, ["file", "prompt", *names, "error"], lineterminator="\n")
        self._writer.writeheader()

    def _flush(self) -> None:
        assert self._writer is not None
        for sample in self._waiting:
            new = [name for name in sample.scores if name not in self._names]
            if new:
                sample.errors.append(f"scores that the first sample had not: {', '.join(new)}")
            row = {name: repr(value) for name, value in sample.scores.items() if name not in new}
            self._writer.writerow(
                {"file": sample.file, "prompt": sample.prompt, **row, "error": "; ".join(sample.errors)}
            )
        self._waiting = []
        self._stream.flush()


def main(args: argparse.Namespace) -> int:
    """`sidecar score`. Returns 0, or 1 where some file has an error. Raises ValueError in one line."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if args.frames < 0 or args.threads < 1:
        raise ValueError(f"frames, threads: {args.frames}, {args.threads}; at least 0 and at least 1 are needed")
    files = find_files(args.files)
    prompts = read_prompts(args.prompts, files)
    if not prompts:
        raise ValueError(
            f"prompts: {args.prompts!r} has none for any of the {len(files)} files; a CSV with the columns file and "
            "prompt, NAME.txt beside each file, or --prompts none is needed"
        )
    from .scorer_process import open_scorers, set_up_torch
    from .settings import scorer_list

    set_up_torch(args.threads)
    scorers = open_scorers(scorer_list(args.scorer), args.weights, args.device, args.threads)
    size = max(int(scorer.batch_size) for scorer in scorers.values())
    failed = done = 0
    with ExitStack() as stack:
        out: TextIO = sys.stdout
        if args.out != "-":
            try:
                out = stack.enter_context(open(args.out, "w", newline=""))
            except OSError as error:
                raise ValueError(f"out: {args.out!r} cannot be written ({error.strerror})") from None
        columns = (TextColumn("rating"), BarColumn(), MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
        bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        job = bar.add_task("", total=len(files))
        table = Table(out)
        stack.callback(table.close)
        for run in batches(files, prompts, args.frames, size):
            rate(run, scorers)
            table.add(run)
            done += len(run)
            failed += sum(bool(sample.errors) for sample in run)
            bar.update(job, completed=done)
    where = "the standard output" if args.out == "-" else os.fspath(args.out)
    print(f"rated {done - failed} of {done} files, scores in {where}", file=sys.stderr)
    return int(failed > 0)
