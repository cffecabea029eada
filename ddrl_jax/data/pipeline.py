"""Batches of clips, with Grain: batch n is a pure function of (seed, n).

Every data set here is a `grain.MapDataset` without end: `dataset[n]` is this process's part of global batch n.
Nothing but n is needed to resume, and the global batch does not depend on how many processes read it: process p
of P holds rows p*B/P .. (p+1)*B/P - 1, the layout that `jax.make_array_from_process_local_data` expects of a
leading axis sharded over processes. `dataset[n:].to_iter_dataset()` reads ahead in threads.

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


def _check_split(name: str, batch_size: int, process_index: int, process_count: int) -> None:
    if batch_size < 1:
        raise ValueError(f"{name} = {batch_size}: must be at least 1")
    if process_count < 1 or batch_size % process_count:
        raise ValueError(f"{name} = {batch_size}: must be a multiple of the process count {process_count}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index = {process_index}: must be in 0 .. {process_count - 1}")


def _index_batches(length: int, batch_size: int, seed: int, process_index: int, process_count: int) -> grain.MapDataset:
    """This process's indices of each global batch: int64 (batch_size/process_count,).

    A fresh shuffle each pass. Passes follow each other without a seam, so no index is dropped at the end of one.
    """
    local = batch_size // process_count
    rows = slice(process_index * local, (process_index + 1) * local)
    # The global batch is formed before it is cut, so that it does not depend on the process count.
    return (
        grain.MapDataset.range(length)
        .shuffle(seed=seed)
        .repeat()
        .batch(batch_size, batch_fn=lambda indices: np.asarray(indices[rows], np.int64))
    )


def clip_batches(
    source: ClipSource, batch_size: int, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.MapDataset:
    """Shuffled batches of clips without end.

    Args:
      source: the clips.
      batch_size: rows of the global batch; a multiple of process_count.
      seed: of the order, in 0 .. 2**32 - 1; the clips have their own seed.
      process_index, process_count: which rows of the global batch to return.

    Returns:
      A MapDataset; element n is `source.batch` of this process's part of batch n.

    Raises:
      ValueError: batch_size, process_index or process_count do not fit, or the source is empty.
    """
    _check_split("batch_size", batch_size, process_index, process_count)
    if len(source) == 0:
        raise ValueError("source has 0 clips: at least 1 is needed")
    return _index_batches(len(source), batch_size, seed, process_index, process_count).map(source.batch)


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
    source: BucketedSource, batch_size: int, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.MapDataset:
    """Shuffled batches without end, each of clips of one shape.

    Buckets take turns in proportion to their sizes, as evenly spaced as can be from a start drawn from the seed, so
    that over time every clip is seen equally often. Within a bucket there is a fresh shuffle each pass and no seam
    between passes; a bucket of fewer clips than a batch repeats them.

    Args:
      source: the clips.
      batch_size: rows of the global batch; a multiple of process_count.
      seed: of the order, in 0 .. 2**32 - 1.
      process_index, process_count: which rows of the global batch to return. All processes see the same bucket.

    Returns:
      A MapDataset; element n is `source.batch` of this process's part of batch n, a pure function of (seed, n).

    Raises:
      ValueError: batch_size, process_index or process_count do not fit, or the source is empty.
    """
    _check_split("batch_size", batch_size, process_index, process_count)
    buckets = [np.asarray(index_N, np.int64) for _, index_N in sorted(source.buckets.items()) if len(index_N)]
    if not buckets:
        raise ValueError("source has 0 clips: at least 1 is needed")
    rng = np.random.Generator(np.random.PCG64([_BUCKET_STREAM, seed]))
    sizes = [len(index_N) for index_N in buckets]
    offsets = [int(rng.integers(sum(sizes[b:]))) for b in range(len(sizes))]
    orders = [
        _index_batches(size, batch_size, int(rng.integers(2**32)), process_index, process_count) for size in sizes
    ]

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
      batch_size: conditions of the global batch; a process takes its rows of the mask.
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
