"""Moving handwritten digits: the embedded data set of captioned video clips.

A clip is one real 8x8 scan (scikit-learn's `load_digits`: 1,797 scans, 10 classes) that moves over a
small canvas with constant velocity, captioned "a seven moving up and to the left". Clip n of a split is a
pure function of (seed, split, n): there is no generator state to save, and the clips asked for together do not matter.

Needs numpy and scikit-learn only, so that programs without jax can read it. Must not know about
batching over processes (`data.pipeline`) or about models.

Shape legend: N clips, T frames, H rows, W columns, C channels (1).
"""

from __future__ import annotations

import functools
import os
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

Split = Literal["train", "scorer", "judge", "heldout"]
SPLITS: tuple[str, ...] = get_args(Split)

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Clockwise from up; the last one does not move.
DIRECTIONS = (
    "up",
    "up and to the right",
    "to the right",
    "down and to the right",
    "down",
    "down and to the left",
    "to the left",
    "up and to the left",
    "still",
)
# Each (digit, direction) can be said in eight ways, so that there are captions that training never sees.
MOVING = ("moving", "drifting", "gliding", "sliding")
RESTING = ("staying", "standing", "resting", "sitting")
WORDINGS = 2 * len(MOVING)
_HELDOUT_WORDINGS = 3  # of the eight, another three for each digit and direction
_DIAGONAL = 0.5**0.5
# Unit velocities (rows, columns); rows count downwards.
VELOCITIES = np.array(
    [
        (-1, 0),
        (-_DIAGONAL, _DIAGONAL),
        (0, 1),
        (_DIAGONAL, _DIAGONAL),
        (1, 0),
        (_DIAGONAL, -_DIAGONAL),
        (0, -1),
        (-_DIAGONAL, -_DIAGONAL),
        (0, 0),
    ],
    np.float64,
)

SCAN = 8  # pixels on a side of a scan
CLIPS_FILE = "clips.npz"
NOMINAL_LENGTH = 2**31 - 1

# Where each split lies in a fixed shuffle of every digit's scans, as fractions of it.
_TRAIN_END, _JUDGE_END, _SCORER_END = 0.55, 0.80, 1 / 3
_SPLIT_SEED = 20251204
# Path length and offset of the path's middle from the centre, as fractions of the free space (canvas minus scan).
# With 4 frames on 12x12 that is 0.8 to 1.2 pixels a frame and up to 1 pixel.
_PATH = (0.6, 0.9)
_OFFSET = 0.25

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def caption(digit: int, direction: int, wording: int = 0) -> str:
    """The caption of a digit (0..9) and a direction (0..8), said in one of eight ways: "an eight staying still"."""
    if not (0 <= digit < len(DIGITS) and 0 <= direction < len(DIRECTIONS) and 0 <= wording < WORDINGS):
        raise ValueError(
            f"digit {digit}, direction {direction}, wording {wording}: must be in 0..9, 0..8 and 0..{WORDINGS - 1}"
        )
    name, (named, verb) = DIGITS[digit], divmod(wording, len(MOVING))
    article = "the digit" if named else "an" if name[0] == "e" else "a"
    moves = direction != len(DIRECTIONS) - 1
    return f"{article} {name} {(MOVING if moves else RESTING)[verb]} {DIRECTIONS[direction]}"


def is_heldout(digit: Any, direction: Any, wording: Any) -> Any:
    """Whether training never sees a caption: three wordings of eight, rotating over digits and directions."""
    return (wording + 3 * digit + direction) % WORDINGS < _HELDOUT_WORDINGS


def all_prompts(heldout: bool | None = None) -> list[tuple[int, int, str]]:
    """Prompts as (digit, direction, caption): all 720, the 450 of training (False) or the 270 held-out ones (True)."""
    return [
        (d, m, caption(d, m, w))
        for w in range(WORDINGS)
        for d in range(len(DIGITS))
        for m in range(len(DIRECTIONS))
        if heldout is None or is_heldout(d, m, w) == heldout
    ]


VOCABULARY: tuple[str, ...] = tuple(dict.fromkeys(w for _, _, text in all_prompts() for w in text.split()))
MAX_WORDS = max(len(text.split()) for _, _, text in all_prompts())


@functools.cache
def _scans() -> tuple[np.ndarray, np.ndarray]:
    """Scans float32 (1797,8,8) in [0,1] and their digits (1797,)."""
    # Imported here: scikit-learn takes a second to import, and captions do not need it.
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images / 16.0).astype(np.float32), data.target.astype(np.int32)


@functools.cache
def split_scans(split: str) -> np.ndarray:
    """Row numbers in `load_digits` of the scans of a split, sorted; int64 (n,).

    The splits are the same for every seed and stratified by digit. "train", "judge" and "heldout" have
    no scan in common and together hold all of them; "scorer" is the part of "train" that the reward model learns from.
    """
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: must be one of {', '.join(SPLITS)}")
    digit = _scans()[1]
    rng = np.random.Generator(np.random.PCG64(_SPLIT_SEED))
    rows = []
    for d in range(len(DIGITS)):
        shuffled = rng.permutation(np.flatnonzero(digit == d))
        train, judge, scorer = (round(f * len(shuffled)) for f in (_TRAIN_END, _JUDGE_END, _SCORER_END))
        first, last = {
            "train": (0, train),
            "scorer": (0, scorer),
            "judge": (train, judge),
            "heldout": (judge, len(shuffled)),
        }[split]
        rows.append(shuffled[first:last])
    out = np.sort(np.concatenate(rows))
    out.setflags(write=False)
    return out


def _mix(z: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014), on uint64 arrays."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _render(scan_N88: np.ndarray, start_N2: np.ndarray, step_N2: np.ndarray, frames: int, size: int):
    """Bilinear rendering of scans at start + t*step (rows, columns) -> float32 (N,T,size,size) in [0,1]."""
    t = np.arange(frames)
    pos_NT2 = start_N2[:, None] + t[None, :, None] * step_N2[:, None]
    # A bilinear shift is separable: canvas row i takes scan row r with weight max(0, 1 - |i - pos - r|).
    grid = np.arange(size)[:, None] - np.arange(SCAN)[None, :]
    weight_NT2HR = np.maximum(0.0, 1.0 - np.abs(grid - pos_NT2[..., None, None])).astype(np.float32)
    rows_NTHC = weight_NT2HR[:, :, 0] @ scan_N88[:, None]
    return rows_NTHC @ weight_NT2HR[:, :, 1].swapaxes(-1, -2)


@dataclass(frozen=True)
class Clip:
    """One clip: video uint8 (T,H,W,1); digit 0..9; direction 0..8 (`DIRECTIONS`); scan, its row in `load_digits`."""

    video: np.ndarray
    digit: int
    direction: int
    caption: str
    scan: int


@dataclass(frozen=True)
class DigitClips:
    """A random-access stream of clips; clip n is a pure function of (seed, split, n) and of the clip's shape.

    Digit and direction are independent and uniform, the scan is uniform within its digit. The wording of the caption is
    uniform over the training ones for "train", over the held-out ones for "heldout", over all for the others, whose
    readers have to know every prompt.

    Raises:
      ValueError: unknown split, fewer than 2 frames, a canvas under 10 pixels, a negative seed.
    """

    split: str
    frames: int = 4
    size: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        split_scans(self.split)
        if self.frames < 2:
            raise ValueError(f"frames = {self.frames}: a moving clip needs at least 2")
        if self.size < SCAN + 2:
            raise ValueError(f"size = {self.size}: a digit needs room to move, at least {SCAN + 2}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed}: must be in 0 .. 2**63 - 1")

    def __len__(self) -> int:
        return NOMINAL_LENGTH

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every word that a caption can hold."""
        return VOCABULARY

    @functools.cached_property
    def _by_digit(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of the split's scans sorted by digit, first position and count of each digit."""
        rows = split_scans(self.split)
        digit = _scans()[1][rows]
        count = np.bincount(digit, minlength=len(DIGITS))
        return rows[np.argsort(digit, kind="stable")], np.cumsum(count) - count, count

    def _uniform(self, index_N: np.ndarray, draws: int) -> np.ndarray:
        """float64 (draws,N) in [0,1): a hash of (seed, split, n, draw), so nothing depends on call order."""
        # Arrays of one, not scalars: numpy warns when a scalar product wraps around, as it must here.
        seed, stream = np.array([[self.seed], [SPLITS.index(self.split) + 1]], np.uint64)
        key = _mix(_mix(seed) + stream * _GOLDEN)
        state_N = _mix(index_N.astype(np.uint64) * _GOLDEN + key)
        counter = np.arange(1, draws + 1, dtype=np.uint64)[:, None] * _GOLDEN
        return (_mix(state_N[None] + counter) >> np.uint64(11)) * 2.0**-53

    def arrays(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Clips as stored: video uint8 (N,T,H,W,1); digit, direction, wording, scan int32 (N,)."""
        index_N = np.asarray(indices, np.int64).reshape(-1)
        if index_N.size and not (index_N.min() >= 0 and index_N.max() < NOMINAL_LENGTH):
            raise IndexError(f"clip index must be in 0 .. {NOMINAL_LENGTH - 1}")
        u = self._uniform(index_N, 7)
        digit_N = (u[0] * len(DIGITS)).astype(np.int64)
        direction_N = (u[1] * len(DIRECTIONS)).astype(np.int64)
        rows, first, count = self._by_digit
        scan_N = rows[first[digit_N] + (u[2] * count[digit_N]).astype(np.int64)]

        free = self.size - SCAN
        low, high = _PATH
        path_N2 = VELOCITIES[direction_N] * (free * (low + (high - low) * u[3]))[:, None]
        # The path's middle lies near the centre, and never so far off that the scan would leave the canvas.
        room_N2 = np.minimum(_OFFSET * free, (free - np.abs(path_N2)) / 2)
        middle_N2 = free / 2 + room_N2 * (2 * u[4:6].T - 1)
        canvas_NTHW = _render(
            _scans()[0][scan_N],
            middle_N2 - path_N2 / 2,
            path_N2 / (self.frames - 1),
            self.frames,
            self.size,
        )
        first_wording, wordings = {
            "train": (_HELDOUT_WORDINGS, WORDINGS - _HELDOUT_WORDINGS),
            "heldout": (0, _HELDOUT_WORDINGS),
        }.get(self.split, (0, WORDINGS))
        turn_N = first_wording + (u[6] * wordings).astype(np.int64)
        return {
            "video": np.rint(canvas_NTHW * 255).astype(np.uint8)[..., None],
            "wording": ((turn_N - 3 * digit_N - direction_N) % WORDINGS).astype(np.int32),
            "digit": digit_N.astype(np.int32),
            "direction": direction_N.astype(np.int32),
            "scan": scan_N.astype(np.int32),
        }

    def clip(self, n: int) -> Clip:
        """Clip n."""
        a = self.arrays([n])
        digit, direction = int(a["digit"][0]), int(a["direction"][0])
        return Clip(a["video"][0], digit, direction, _captions(a)[0], int(a["scan"][0]))

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Clips for a model: video float32 (N,1,T,H,W) in [-1,1]; digit, direction int32 (N,); caption list of N."""
        a = self.arrays(indices)
        return _model_batch(a["video"], a["digit"], a["direction"], _captions(a))


def _captions(a: dict[str, np.ndarray]) -> list[str]:
    columns = (a[name].tolist() for name in ("digit", "direction", "wording"))
    return [caption(d, m, w) for d, m, w in zip(*columns, strict=True)]


def _model_batch(
    video_NTHWC: np.ndarray, digit_N: np.ndarray, direction_N: np.ndarray, captions: list[str]
) -> dict[str, Any]:
    video_NCTHW = np.ascontiguousarray(np.moveaxis(video_NTHWC, -1, 1))
    return {
        "video": video_NCTHW.astype(np.float32) / np.float32(127.5) - np.float32(1),
        "digit": digit_N,
        "direction": direction_N,
        "caption": captions,
    }


@dataclass(frozen=True, eq=False)
class StoredClips:
    """Clips read from disk, with the interface of `DigitClips`; video uint8 (N,T,H,W,C), caption a list of N."""

    video: np.ndarray
    digit: np.ndarray
    direction: np.ndarray
    caption: list[str]

    def __len__(self) -> int:
        return len(self.video)

    @functools.cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Every word of the captions, in order of appearance."""
        return tuple(dict.fromkeys(w for text in self.caption for w in text.split()))

    def clip(self, n: int) -> Clip:
        """Clip n; its scan is not known (-1)."""
        return Clip(self.video[n], int(self.digit[n]), int(self.direction[n]), self.caption[n], -1)

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """As `DigitClips.batch`: video float32 (N,C,T,H,W) in [-1,1]."""
        index_N = np.asarray(indices, np.int64).reshape(-1)
        return _model_batch(
            self.video[index_N],
            self.digit[index_N],
            self.direction[index_N],
            [self.caption[i] for i in index_N.tolist()],
        )


def write_clips(
    path: str | os.PathLike[str],
    split: str,
    count: int,
    seed: int = 0,
    frames: int = 4,
    size: int = 12,
) -> Path:
    """Write clips 0..count-1 of a split and return the file.

    Args:
      path: a file ending in .npz, or a folder, in which `clips.npz` is written.

    The file holds video uint8 (N,T,H,W,1), digit and direction int32 (N,), caption unicode (N,); it has no
    pickled objects and appears only when it is complete.
    """
    if count < 1:
        raise ValueError(f"count = {count}: must be at least 1")
    a = DigitClips(split, frames=frames, size=size, seed=seed).arrays(np.arange(count))
    return save_clips(path, StoredClips(a["video"], a["digit"], a["direction"], _captions(a)))


def save_clips(path: str | os.PathLike[str], clips: StoredClips) -> Path:
    """Write clips to the file, or to `clips.npz` in the folder, that `load_clips` reads; returns the file.

    It appears only when it is complete, and a file already there is replaced.
    """
    target = Path(path)
    if target.suffix != ".npz":
        target = target / CLIPS_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as f:
            np.savez_compressed(
                f,
                video=clips.video,
                digit=clips.digit,
                direction=clips.direction,
                caption=np.array(clips.caption),
            )
        os.chmod(partial, 0o644)
        os.replace(partial, target)
    except BaseException:
        os.unlink(partial)
        raise
    return target


def load_clips(path: str | os.PathLike[str], field: str = "data.path") -> StoredClips:
    """Read what `save_clips` or `write_clips` wrote: a folder with `clips.npz`, or such a file.

    Raises:
      ValueError: one line naming `field`, the path and what would be right, when there is nothing there, when it
        cannot be read, or when it does not hold clips.
    """

    def refuse(why: str) -> ValueError:
        right = f"it must be a folder with {CLIPS_FILE} as --mode=prepare or ddrl_jax.data.digits.write_clips makes it"
        return ValueError(f"{field} = {str(path)!r}: {why}; {right}")

    file = Path(path)
    if file.is_dir():
        file = file / CLIPS_FILE
    arrays = {}
    try:
        # Not np.load on the path: it would read other formats as well, and keep the file open when it fails.
        with file.open("rb") as stream, np.lib.npyio.NpzFile(stream, allow_pickle=False) as stored:
            for name in ("video", "digit", "direction", "caption"):
                if name in stored.files:
                    arrays[name] = stored[name]
    except FileNotFoundError as error:
        raise refuse(f"{file.name} is not there") from error
    except PermissionError as error:
        raise refuse(f"no permission to read {file.name}") from error
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise refuse(f"{file.name} is not a readable npz file") from error
    missing = [name for name in ("video", "digit", "direction", "caption") if name not in arrays]
    if missing:
        raise refuse(f"{file.name} has no {', '.join(missing)}")
    video, digit, direction, text = (arrays[k] for k in ("video", "digit", "direction", "caption"))
    if video.dtype != np.uint8 or video.ndim != 5 or len(video) == 0:
        raise refuse(f"video is {video.dtype} {video.shape}, not uint8 (N,T,H,W,C)")
    for name, column, kind in (
        ("digit", digit, "iu"),
        ("direction", direction, "iu"),
        ("caption", text, "U"),
    ):
        if column.shape != video.shape[:1] or column.dtype.kind not in kind:
            raise refuse(f"{name} is {column.dtype} {column.shape} beside {len(video)} videos")
    return StoredClips(video, digit.astype(np.int32), direction.astype(np.int32), text.tolist())
