"""Batches of clips, with Grain: batch n is a pure function of (seed, n).

Every data set here is a `grain.MapDataset` without end: `dataset[n]` is the asked rows of global batch n. Nothing but n
is needed to resume, and the global batch does not depend on how many processes read it, nor on which rows of it each
one reads. `dataset[n:].to_iter_dataset()` reads ahead in threads.

Must not know about models or training.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grain
import numpy as np

from ddrl_jax.data import digits

_PROMPT_SEED = 90
_BUCKET_STREAM, _MASK_STREAM = 1, 2  # of random numbers, so that one seed serves both


class ClipSource(Protocol):
    """Random access to clips: `digits.DigitClips`, `digits.StoredClips`, or a user's own.

    `batch` returns a dict of arrays with a leading axis of len(indices), among them video float32
    (N,C,T,H,W) in [-1,1], and caption, a list of N strings.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Any]: ...


class BucketedSource(ClipSource, Protocol):
    """Clips of several shapes, such as `latent_cache.LatentCache`: only those of one bucket can be in a batch."""

    @property
    def buckets(self) -> Mapping[Any, np.ndarray]:
        """{shape: indices of its clips, int64 (n,)}; together every clip once."""


@dataclasses.dataclass(frozen=True)
class _First:
    """The first `count` clips of a source."""

    source: ClipSource
    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Any]:
        index_N = np.asarray(indices, np.int64).reshape(-1)
        if index_N.size and not (index_N.min() >= 0 and index_N.max() < self.count):
            raise IndexError(f"clip index must be in 0 .. {self.count - 1}")
        return self.source.batch(index_N)


def limited(source: ClipSource, n: int) -> ClipSource:
    """The source's first n clips, 0 all of them (paper, Fig. 5: number of data points).

    The clips of a smaller n are among those of a larger one. A batch of more than n clips repeats them.

    Raises:
      ValueError: n is negative, or the source has fewer; the message names data.limit.
    """
    if not 0 <= n <= len(source):
        raise ValueError(f"data.limit={n}: must be 0 (all) or a number of clips, of which there are {len(source)}")
    return _First(source, n) if n else source


def _asked_rows(batch_size: int, rows: Sequence[int] | np.ndarray | None) -> np.ndarray:
    """The rows to return of a global batch, all of them for None: int64. Raises ValueError."""
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: must be at least 1")
    row_N = np.arange(batch_size) if rows is None else np.asarray(rows, np.int64).reshape(-1)
    if row_N.size and not (row_N.min() >= 0 and row_N.max() < batch_size):
        raise ValueError(f"rows = {row_N.tolist()}: must be in 0 .. {batch_size - 1}")
    return row_N


def _index_batches(length: int, batch_size: int, seed: int, row_N: np.ndarray) -> grain.MapDataset:
    """The indices of those rows of each global batch: int64 (N,).

    A fresh shuffle each pass. Passes follow each other without a seam, so no index is dropped at the end of one.
    """
    # The global batch is formed before rows are taken, so that it does not depend on who reads it.
    return (
        grain.MapDataset.range(length)
        .shuffle(seed=seed)
        .repeat()
        .batch(batch_size, batch_fn=lambda indices: np.asarray(indices, np.int64)[row_N])
    )


def clip_batches(
    source: ClipSource, batch_size: int, seed: int, rows: Sequence[int] | np.ndarray | None = None
) -> grain.MapDataset:
    """Shuffled batches of clips without end.

    Args:
      source: the clips.
      batch_size: rows of the global batch.
      seed: of the order, in 0 .. 2**32 - 1; the clips have their own seed.
      rows: which of them to return, in 0 .. batch_size - 1; None: all.

    Returns:
      A MapDataset; element n is `source.batch` of these rows of batch n.

    Raises:
      ValueError: batch_size or rows do not fit, or the source is empty.
    """
    row_N = _asked_rows(batch_size, rows)
    if len(source) == 0:
        raise ValueError("source has 0 clips: at least 1 is needed")
    return _index_batches(len(source), batch_size, seed, row_N).map(source.batch)


def _bucket_of(n: int, sizes: Sequence[int], offsets: Sequence[int]) -> tuple[int, int]:
    """(bucket of batch n, how many batches before n are of that bucket).

    The first bucket takes evenly spaced batches, in proportion to its size; the next one does the same with what the
    first leaves over, and so on. Integers throughout, so that it is exact for every n.
    """
    left = sum(sizes)
    for bucket, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        before = (n * size + offset) // left
        if ((n + 1) * size + offset) // left > before:
            return bucket, before
        n, left = n - before, left - size
    raise AssertionError("the last bucket takes what is left")


def bucketed_batches(
    source: BucketedSource, batch_size: int, seed: int, rows: Sequence[int] | np.ndarray | None = None
) -> grain.MapDataset:
    """Shuffled batches without end, each of clips of one shape.

    Buckets take turns in proportion to their sizes, as evenly spaced as can be from a start drawn from the seed, so
    that over time every clip is seen equally often. Within a bucket there is a fresh shuffle each pass and no seam
    between passes; a bucket of fewer clips than a batch repeats them.

    Args:
      source: the clips.
      batch_size: rows of the global batch.
      seed: of the order, in 0 .. 2**32 - 1.
      rows: which of them to return, in 0 .. batch_size - 1; None: all. The bucket does not depend on it.

    Returns:
      A MapDataset; element n is `source.batch` of these rows of batch n, a pure function of (seed, n).

    Raises:
      ValueError: batch_size or rows do not fit, or the source is empty.
    """
    row_N = _asked_rows(batch_size, rows)
    buckets = [np.asarray(index_N, np.int64) for _, index_N in sorted(source.buckets.items()) if len(index_N)]
    if not buckets:
        raise ValueError("source has 0 clips: at least 1 is needed")
    rng = np.random.Generator(np.random.PCG64([_BUCKET_STREAM, seed]))
    sizes = [len(index_N) for index_N in buckets]
    offsets = [int(rng.integers(sum(sizes[b:]))) for b in range(len(sizes))]
    orders = [_index_batches(size, batch_size, int(rng.integers(2**32)), row_N) for size in sizes]

    def batch(n: int) -> dict[str, Any]:
        bucket, position = _bucket_of(int(n), sizes, offsets)
        return source.batch(buckets[bucket][orders[bucket][position]])

    return grain.MapDataset.range(sys.maxsize).map(batch)


def image_to_video_mask(seed: int, n: int, batch_size: int, ratio: float = 0.5) -> np.ndarray:
    """Which conditions of global batch n begin with a given frame (I2V), the others being text alone: bool (B,).

    A pure function of its arguments. ratio * batch_size of them do; where that is no whole number, one more does with
    the probability of the rest, drawn anew for each n. Which ones is drawn as well.

    Args:
      seed: 0 or more.
      n: number of the batch.
      batch_size: conditions of the global batch, of which a process takes its rows.
      ratio: in [0,1].

    Raises:
      ValueError: ratio outside [0,1], batch_size below 1.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio = {ratio}: must be in [0,1]")
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: must be at least 1")
    rng = np.random.Generator(np.random.PCG64([_MASK_STREAM, seed, n]))
    whole = math.floor(ratio * batch_size)
    count = whole + int(rng.random() < ratio * batch_size - whole)
    return rng.permutation(batch_size) < count


def _columns(rows: Sequence[tuple[int, int, str]]) -> dict[str, Any]:
    digit, direction, text = zip(*rows, strict=True)
    return {
        "digit": np.array(digit, np.int32),
        "direction": np.array(direction, np.int32),
        "caption": list(text),
    }


def evaluation_prompts(count: int) -> dict[str, Any]:
    """A fixed list of prompts for evaluations before and after: digit, direction int32 (count,), caption list.

    The 270 held-out ones (captions that training never sees) in one fixed mixed order, again and again: any prefix
    is as balanced as can be, and a longer list begins with the shorter one.
    """
    if count < 1:
        raise ValueError(f"count = {count}: must be at least 1")
    table = digits.all_prompts(heldout=True)
    order = np.random.Generator(np.random.PCG64(_PROMPT_SEED)).permutation(len(table))
    return _columns([table[i] for i in itertools.islice(itertools.cycle(order.tolist()), count)])


def heldout_clips(count: int, frames: int = 4, size: int = 12) -> dict[str, Any]:
    """The first `count` held-out clips, the same in every run: what held-out losses and judges are measured on."""
    if count < 1:
        raise ValueError(f"count = {count}: must be at least 1")
    return digits.DigitClips("heldout", frames=frames, size=size).batch(np.arange(count))
