"""A folder of captioned videos: `videos/NAME.mp4` beside `metas/NAME.txt`, the original's format.

Scanning decodes one frame of each file and decides which can be used; all others are listed with the reason. What is
wrong further into a file shows only when it is read. The order is that of the sorted file names, and the frames are the
first ones of each file, so clip i is a function of the folder.

Must not know about latents or models. Errors name data.path.

Shape legend: T frames, H rows, W columns.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np

from ddrl_jax.data import video

SUFFIXES = (".mp4", ".mov", ".webm", ".mkv")
# For `to_iter_dataset`: a clip of 93 frames of 720p is 257 MB, so Grain's default of 500 elements would fill any host.
READ_AHEAD = grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)


@dataclass(frozen=True)
class _Entry:
    name: str
    file: Path
    caption: str
    height: int
    width: int


class VideoFolder:
    """The usable clips of a folder; clip i is `read(i)`.

    A video wider than high, or square, becomes long_size x size (landscape), any other one size x long_size (portrait).

    Args:
      path: holds `videos/` (files ending in .mp4, .mov, .webm or .mkv) and `metas/` (.txt, UTF-8, same stem). Names
        that begin with a dot are left out.
      frames, fps: of a clip; a file must hold as many frames at that rate.
      size, long_size: short and long edge of a clip, in pixels.

    Attributes:
      names: of the clips, the stems of the files, sorted.
      captions: of the clips.
      skipped: (name, reason) of all that cannot be used, sorted: too short, not decodable, without a caption, a
        caption without a video, other files.

    Raises:
      ValueError: the folder has not that form or no usable clip; the message names data.path.
    """

    def __init__(self, path: str | os.PathLike[str], *, frames: int, fps: float, size: int, long_size: int) -> None:
        if not 1 <= size <= long_size:
            raise ValueError(f"size = {size}, long_size = {long_size}: must be 1 <= size <= long_size")
        self.path, self.frames, self.fps = Path(path), frames, fps
        self._short, self._long = size, long_size
        self.skipped: list[tuple[str, str]] = []
        self._entries: list[_Entry] = []

        videos, metas = self.path / "videos", self.path / "metas"
        for folder in (videos, metas):
            if not folder.is_dir():
                raise ValueError(
                    f"data.path={str(path)!r}: has no folder {folder.name}/; videos/ and metas/ are needed"
                )
        texts = {f.stem: f for f in _listed(metas) if f.suffix == ".txt"}
        self.skipped += [(f.name, "metas/ holds .txt files only") for f in _listed(metas) if f.suffix != ".txt"]
        files: dict[str, Path] = {}
        for file in _listed(videos):
            if file.suffix.lower() not in SUFFIXES:
                self.skipped.append((file.name, f"videos/ holds {', '.join(SUFFIXES)} files only"))
            elif file.stem in files:
                self.skipped.append((file.name, f"has the name of {files[file.stem].name}"))
            else:
                files[file.stem] = file
        self.skipped += [(name, "caption without a video") for name in texts if name not in files]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for entry in pool.map(lambda name: self._look(files[name], texts.get(name)), sorted(files)):
                if isinstance(entry, _Entry):
                    self._entries.append(entry)
                else:
                    self.skipped.append(entry)
        self.skipped.sort()
        if not self._entries:
            why = f"; the first is {': '.join(self.skipped[0])}" if self.skipped else ""
            raise ValueError(
                f"data.path={str(path)!r}: has no usable clip of {frames} frames at {fps:g} a second, "
                f"{len(self.skipped)} skipped{why}"
            )
        self.names = [entry.name for entry in self._entries]
        self.captions = [entry.caption for entry in self._entries]

    def _look(self, file: Path, text: Path | None) -> _Entry | tuple[str, str]:
        """An entry, or (name, reason)."""
        name = file.stem
        if text is None:
            return name, f"no caption: metas/{name}.txt is missing"
        try:
            caption = text.read_text(encoding="utf-8-sig").strip()
            if not caption:
                return name, f"no caption: metas/{name}.txt is empty"
            seen = video.probe(file)
        except UnicodeDecodeError:
            return name, f"metas/{name}.txt is not UTF-8"
        except OSError as e:
            return name, f"metas/{name}.txt cannot be read: {e.strerror}"
        except ValueError as e:
            return name, self._reason(file, e)
        available = seen.frames_at(self.fps)
        if available is not None and available < self.frames:
            return name, f"too short: has {available} frames at {self.fps:g} a second, {self.frames} are needed"
        wide = seen.width >= seen.height
        return _Entry(name, file, caption, *((self._short, self._long) if wide else (self._long, self._short)))

    @staticmethod
    def _reason(file: Path, error: ValueError) -> str:
        return str(error).removeprefix(f"{file}: ")

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, i: int) -> tuple[int, int]:
        """(H,W) of clip i."""
        return self._entries[i].height, self._entries[i].width

    def read(self, i: int) -> dict[str, Any]:
        """Clip i: video uint8 (T,H,W,3), caption, name.

        Raises:
          ValueError: the file cannot be decoded to the end of the clip; one line with its path and the reason.
        """
        entry = self._entries[i]
        pixels: np.ndarray = video.read_clip(
            entry.file, frames=self.frames, fps=self.fps, height=entry.height, width=entry.width
        )
        return {"video": pixels, "caption": entry.caption, "name": entry.name}

    def read_or_reason(self, i: int) -> dict[str, Any]:
        """`read(i)`, or where that fails {"name", "error"}: the reason without the path."""
        entry = self._entries[i]
        try:
            return self.read(i)
        except ValueError as e:
            return {"name": entry.name, "error": self._reason(entry.file, e)}


def _listed(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if not f.name.startswith("."))


def clip_dataset(
    folder: VideoFolder, process_index: int = 0, process_count: int = 1, done: Collection[str] = ()
) -> grain.MapDataset:
    """One pass over this process's clips, for preparing: every process_count-th one, in order.

    Iterate with `.to_iter_dataset(READ_AHEAD)`, which decodes ahead in threads.

    Args:
      folder: the clips.
      process_index, process_count: clip i is read by process i % process_count.
      done: names to leave out, those that an earlier, interrupted pass has written. They do not change who reads what.

    Returns:
      A MapDataset of `VideoFolder.read_or_reason`: a file that turns out to be damaged does not end the pass.

    Raises:
      ValueError: process_index or process_count do not fit.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index = {process_index}: must be in 0 .. {process_count - 1}")
    done = frozenset(done)
    todo = [i for i in range(process_index, len(folder), process_count) if folder.names[i] not in done]
    return grain.MapDataset.source(todo).map(folder.read_or_reason)
