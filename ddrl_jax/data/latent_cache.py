"""Latents and captions on disk: what `--mode=prepare` writes and training reads.

A cache is a folder in data.path: ArrayRecord shards, a JSON table beside each (name, shape and caption of its clips),
and an index a writing process: what the latents were made with, and size and SHA-256 of every finished shard. A shard
counts from the moment the index names it, so a killed run loses at most one shard's clips. A record is a length, a JSON
header and raw little-endian numbers, nothing that is executed on reading.

Must not know how latents are made. Errors about a cache name data.path, the folder that it is in.

Shape legend: N clips, C channels, T latent frames, h rows, w columns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from ddrl_jax import files

FORMAT = 1
_MAX_HEADER = 1 << 20
_OPEN_SHARDS = 64  # readers kept open; a cache may have more shards than a process may have files


def _index_file(folder: Path, process_index: int, process_count: int) -> Path:
    if process_count == 1:
        return folder / "index.json"
    return folder / f"index-{process_index:05d}-of-{process_count:05d}.json"


class _Damaged(ValueError):
    """Has the whole message already."""


def _where(folder: Path) -> str:
    return f"data.path={str(folder.parent)!r}: {folder.name}/"


def exists(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a cache, finished or not."""
    return any(Path(folder).glob("index*.json"))


def _table_file(shard: Path) -> Path:
    return shard.with_suffix(".json")


def _write_atomically(file: Path, content: bytes) -> None:
    with files.whole(file) as partial:
        partial.write_bytes(content)


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True).encode()


def _plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read back: tuples are lists in JSON."""
    return json.loads(_json(dict(fingerprint)))


def _difference(was: Mapping[str, Any], wanted: Mapping[str, Any], keys: Collection[str]) -> str | None:
    """The first of the fields in which two fingerprints differ, in words."""
    for key in sorted(keys):
        if key not in was or key not in wanted or was[key] != wanted[key]:
            show = [f"{key}={f[key]!r}" if key in f else f"no {key}" for f in (was, wanted)]
            return f"was prepared with {show[0]}, not {show[1]}"
    return None


def encode_record(name: str, latent: np.ndarray, caption: str) -> bytes:
    """A record: header length (4 bytes), JSON header, latent in float32."""
    text = _json({"name": name, "caption": caption, "latent": {"shape": list(latent.shape), "dtype": "float32"}})
    return b"".join([struct.pack("<I", len(text)), text, latent.astype("<f4", copy=False).tobytes()])


def decode_record(record: bytes) -> dict[str, Any]:
    """The inverse: name, caption, latent float32 (C,T,h,w).

    Raises:
      ValueError: not such a record, or its length is not what the header says.
    """
    if len(record) < 4 or not 0 < (length := struct.unpack_from("<I", record)[0]) <= min(_MAX_HEADER, len(record) - 4):
        raise ValueError("a record has no header")
    try:
        header = json.loads(record[4 : 4 + length])
    except ValueError as e:
        raise ValueError("a record's header is not JSON") from e
    try:
        name, caption, shape, dtype = (
            header["name"],
            header["caption"],
            header["latent"]["shape"],
            header["latent"]["dtype"],
        )
        if len(shape) != 4 or not all(isinstance(n, int) and n > 0 for n in shape):
            raise ValueError(f"a record's header has shape {shape}")
        size = 4 * math.prod(shape)
    except (KeyError, TypeError) as e:
        raise ValueError(f"a record's header lacks what it must have: {e}") from e
    if dtype != "float32" or not isinstance(name, str) or not isinstance(caption, str):
        raise ValueError("a record's header is not that of a clip")
    if size != len(record) - 4 - length:
        raise ValueError("a record has another length than its header says")
    latent = np.frombuffer(record, "<f4", offset=4 + length).reshape(shape)
    return {"name": name, "caption": caption, "latent": latent.astype(np.float32)}


def _read_index(file: Path) -> dict[str, Any]:
    """Raises ValueError, without the folder."""
    try:
        index = json.loads(file.read_bytes())
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            found = index.get("format") if isinstance(index, dict) else None
            raise ValueError(f"{file.name} is of format {found!r}, this program reads {FORMAT}")
        for shard in index["shards"]:
            if Path(shard["file"]).name != shard["file"]:
                raise ValueError(f"{file.name} names a file outside the folder")
            for key, kind in (("bytes", int), ("clips", int), ("sha256", str), ("table_sha256", str)):
                if not isinstance(shard[key], kind):
                    raise ValueError(f"{file.name} is damaged")
        skipped = [(name, reason) for name, reason in index["skipped"]]
        return {**index, "skipped": skipped, "fingerprint": dict(index["fingerprint"]), "finished": index["finished"]}
    except OSError as e:
        raise ValueError(f"{file.name} cannot be read: {e.strerror}") from e
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as e:
        raise ValueError(f"{file.name} is damaged") from e


def _read_table(folder: Path, shard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """[{"name", "shape", "caption"}] of a finished shard. Raises ValueError, without the folder."""
    file = _table_file(folder / shard["file"])
    try:
        content = file.read_bytes()
    except OSError as e:
        raise ValueError(f"{file.name} cannot be read: {e.strerror}") from e
    if hashlib.sha256(content).hexdigest() != shard["table_sha256"]:
        raise ValueError(f"{file.name} is damaged: its SHA-256 is not that of the index")
    table = json.loads(content)
    if len(table) != shard["clips"]:
        raise ValueError(f"{file.name} has {len(table)} clips, the index says {shard['clips']}")
    return table


class CacheWriter:
    """Writes a cache, or goes on with one; a context manager.

        with CacheWriter(folder, fingerprint) as cache:
            for clip in ...:                            # those not in cache.done
                cache.add(clip["name"], latent, clip["caption"])
            cache.finish()

    Leaving the context, with an exception too, keeps what was added; only a killed process loses the clips of the shard
    it was writing. Without `finish` the cache stays unfinished, and readers refuse it.

    What was skipped is not remembered from run to run: those files are tried again, for they may have been repaired.

    Args:
      folder: made where it is not there.
      fingerprint: what the latents depend on (codec, frames, fps, sizes, ...), as JSON can hold it. A cache with
        another one, with more fields or with fewer, is not gone on with.
      shard_clips: clips a shard.
      process_index, process_count: several processes write one cache, each its own files and its own index.

    Attributes:
      done: names that are in finished shards, of all processes, as found at the start and added since.

    Raises:
      ValueError: the folder holds another cache, or a damaged one; the message names data.path.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        fingerprint: Mapping[str, Any],
        shard_clips: int = 64,
        *,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        if shard_clips < 1:
            raise ValueError(f"shard_clips = {shard_clips}: must be at least 1")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index = {process_index}: must be in 0 .. {process_count - 1}")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shard_clips = shard_clips
        self.done: set[str] = set()
        self._file = _index_file(self.folder, process_index, process_count)
        self._prefix = f"latents-{process_index:05d}-"
        self._index: dict[str, Any] = {
            "format": FORMAT,
            "fingerprint": _plain(fingerprint),
            "finished": False,
            "shards": [],
            "skipped": [],
        }
        self._skipped: dict[str, str] = {}
        self._writer: ArrayRecordWriter | None = None
        self._table: list[dict[str, Any]] = []
        try:
            self._go_on(process_count)
        except ValueError as e:
            raise ValueError(f"{_where(self.folder)} {e}") from e

    def _go_on(self, process_count: int) -> None:
        expected = {_index_file(self.folder, p, process_count).name for p in range(process_count)}
        for file in sorted(self.folder.glob("index*.json")):
            if file.name not in expected:
                raise ValueError(
                    f"holds {file.name}: it must be gone on with by as many processes, not {process_count}"
                )
            found = _read_index(file)
            was, now = found["fingerprint"], self._index["fingerprint"]
            if differs := _difference(was, now, was.keys() | now.keys()):
                raise ValueError(f"{differs}: prepare into another folder")
            for shard in found["shards"]:
                self.done.update(row["name"] for row in _read_table(self.folder, shard))
            if file == self._file:
                self._index["shards"] = found["shards"]
        # What a killed process left: shards that no index names.
        finished = {shard["file"] for shard in self._index["shards"]}
        for file in self.folder.glob(self._prefix + "*"):
            if file.with_suffix(".array_record").name not in finished or file.suffix == ".partial":
                file.unlink()
        numbers = [int(Path(name).stem.removeprefix(self._prefix)) for name in finished]
        self._next = max(numbers, default=-1) + 1

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """(name, reason) of this run so far, sorted."""
        return sorted(self._skipped.items())

    def _shard_file(self) -> Path:
        return self.folder / f"{self._prefix}{self._next:05d}.array_record"

    def _partial(self) -> Path:
        return self._shard_file().with_suffix(".partial")

    def add(self, name: str, latent: np.ndarray, caption: str) -> None:
        """Add a clip.

        Args:
          name: unique in the cache.
          latent: (C,T,h,w), finite, stored in float32.
          caption: its text.

        Raises:
          ValueError: the name is there already, another shape, a number that is not finite.
          OSError: the disk is full.
        """
        latent = np.asarray(latent)
        if name in self.done:
            raise ValueError(f"name = {name!r}: is in the cache already")
        if latent.ndim != 4 or 0 in latent.shape:
            raise ValueError(f"latent of {name!r} = {latent.shape}: must be (C,T,h,w)")
        if not np.isfinite(latent.astype(np.float32, copy=False)).all():
            raise ValueError(f"latent of {name!r}: has numbers that are not finite")
        record = encode_record(name, latent, caption)
        try:
            if self._writer is None:
                # Groups of one: clips are read one by one. Floats of latents do not compress.
                self._writer = ArrayRecordWriter(str(self._partial()), "group_size:1,uncompressed")
            self._writer.write(record)
        except RuntimeError as e:
            self._drop()
            raise OSError(f"{self._partial()}: cannot be written: {str(e).splitlines()[0]}") from e
        self._table.append({"name": name, "shape": list(latent.shape), "caption": caption})
        self._skipped.pop(name, None)
        self.done.add(name)
        if len(self._table) == self.shard_clips:
            self._finish_shard()

    def skip(self, name: str, reason: str) -> None:
        """Note that a file gives no clip, and why; written with the next shard."""
        self._skipped[name] = reason

    def _drop(self) -> None:
        """Give up the shard being written."""
        self.done.difference_update(row["name"] for row in self._table)
        self._table, self._writer = [], None
        with contextlib.suppress(FileNotFoundError):
            self._partial().unlink()

    def _finish_shard(self) -> None:
        assert self._writer is not None
        partial, shard = self._partial(), self._shard_file()
        try:
            self._writer.close()
            reader = ArrayRecordReader(str(partial))
            written = reader.num_records()
            reader.close()
        except RuntimeError as e:
            self._drop()
            raise OSError(f"{partial}: cannot be written: {str(e).splitlines()[0]}") from e
        if written != len(self._table):
            self._drop()
            raise OSError(f"{partial}: holds {written} of the records written")
        with partial.open("rb+") as f:
            os.fsync(f.fileno())
        table = _json(self._table)
        entry = {
            "file": shard.name,
            "bytes": partial.stat().st_size,
            "sha256": _sha256(partial),
            "clips": len(self._table),
            "shapes": sorted({tuple(row["shape"]) for row in self._table}),
            "table_sha256": hashlib.sha256(table).hexdigest(),
        }
        _write_atomically(_table_file(shard), table)
        os.replace(partial, shard)
        self._index["shards"].append(entry)
        self._table, self._writer = [], None
        self._next += 1
        self._write_index()

    def _write_index(self) -> None:
        self._index["skipped"] = self.skipped
        _write_atomically(self._file, _json(self._index))

    def finish(self) -> None:
        """Write what is left and declare this process's part complete."""
        if self._table:
            self._finish_shard()
        self._index["finished"] = True
        self._write_index()
        self._index["finished"] = False  # should more be added

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._table:
            self._finish_shard()


class LatentCache:
    """A finished cache, read at random; clips are in the order of their names, whoever wrote them.

    Opening checks that every file is there with its size; `verify` reads all of it.

    Args:
      folder: the cache.
      fingerprint: what the latents must have been made with; None takes any. The cache's own may have further fields,
        such as which weights made synthetic clips.
      heldout: how many clips `split("heldout")` has. They are chosen by a hash of the name, so that a larger number
        contains the smaller one and a few new files change few of them.

    Attributes:
      names, captions: of the clips.
      shapes: (C,T,h,w) of each clip's latent.
      skipped: (name, reason) of what gave no clip.
      fingerprint: what the latents were made with, all of its fields.

    Raises:
      ValueError: no cache, unfinished, another fingerprint, damaged; one line that names data.path.
    """

    def __init__(
        self, folder: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None, heldout: int = 0
    ) -> None:
        self.folder = Path(folder)
        try:
            self._open(None if fingerprint is None else _plain(fingerprint))
        except ValueError as e:
            raise ValueError(f"{_where(self.folder)} {e}") from e
        if not 0 <= heldout < len(self):
            raise ValueError(
                f"eval.heldout_clips={heldout}: must be at least 0 and below the {len(self)} clips of {self.folder}"
            )
        self._heldout = heldout

    def _open(self, fingerprint: dict[str, Any] | None) -> None:
        found = sorted(self.folder.glob("index*.json"))
        if not found:
            raise ValueError("is not there or has no index.json: --mode=prepare makes it")
        last = found[-1].stem.partition("-of-")[2]
        count = int(last) if last.isdigit() else 1
        expected = {_index_file(self.folder, p, count) for p in range(count)}
        indices = [_read_index(file) for file in found]
        if set(found) != expected:
            odd = min(expected ^ set(found))
            raise ValueError(f"{odd.name} {'is missing' if odd in expected else 'is of another run'}")
        for file, index in zip(found, indices, strict=True):
            was, first = index["fingerprint"], indices[0]["fingerprint"]
            if differs := _difference(was, first, was.keys() | first.keys()):
                raise ValueError(f"{file.name} {differs} as in {found[0].name}")
            if fingerprint is not None and (differs := _difference(was, fingerprint, fingerprint.keys())):
                raise ValueError(f"{differs}: prepare another one, or set what it was prepared with")
            if index["finished"] is not True:
                raise ValueError(f"is unfinished ({file.name}): run --mode=prepare again, it goes on")
        self.fingerprint: dict[str, Any] = indices[0]["fingerprint"]
        self.skipped: list[tuple[str, str]] = sorted(pair for index in indices for pair in index["skipped"])
        self._shards: list[dict[str, Any]] = [shard for index in indices for shard in index["shards"]]
        rows = []
        for number, shard in enumerate(self._shards):
            file = self.folder / shard["file"]
            if not file.is_file():
                raise ValueError(f"{shard['file']} is missing")
            if (size := file.stat().st_size) != shard["bytes"]:
                raise ValueError(f"{shard['file']} has {size} bytes, the index says {shard['bytes']}")
            for position, row in enumerate(_read_table(self.folder, shard)):
                rows.append((row["name"], tuple(row["shape"]), row["caption"], number, position))
        rows.sort()
        if not rows:
            raise ValueError(f"has no clips, {len(self.skipped)} were skipped")
        for (name, *_), (other, *_) in itertools.pairwise(rows):
            if name == other:
                raise ValueError(f"has the name {name!r} twice")
        self._rows: list[tuple[str, tuple[int, ...], str, int, int]] = rows
        self._reader = functools.lru_cache(_OPEN_SHARDS)(self._open_shard)

    def _open_shard(self, number: int) -> ArrayRecordReader:
        shard = self._shards[number]
        # Dropped from the cache of readers it is closed when the last thread that reads from it lets go.
        reader = ArrayRecordReader(str(self.folder / shard["file"]), "readahead_buffer_size:0,max_parallelism:0")
        if not reader.ok() or reader.num_records() != shard["clips"]:
            raise _Damaged(f"{_where(self.folder)} {shard['file']} is damaged")
        return reader

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def names(self) -> list[str]:
        return [row[0] for row in self._rows]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [row[1] for row in self._rows]

    @property
    def captions(self) -> list[str]:
        return [row[2] for row in self._rows]

    @property
    def buckets(self) -> dict[tuple[int, ...], np.ndarray]:
        """{(C,T,h,w): indices of the clips of that shape, int64, sorted}, sorted by shape."""
        out: dict[tuple[int, ...], list[int]] = {}
        for i, shape in enumerate(self.shapes):
            out.setdefault(shape, []).append(i)
        return {shape: np.asarray(out[shape], np.int64) for shape in sorted(out)}

    def _read(self, i: int) -> dict[str, Any]:
        name, shape, caption, number, position = self._rows[i]
        where = f"{_where(self.folder)} {self._shards[number]['file']}, record {position},"
        try:
            clip = decode_record(self._reader(number).read([position])[0])
        except RuntimeError as e:  # the chunk's own hash
            raise ValueError(f"{where} is damaged: {str(e).partition(';')[0].splitlines()[0]}") from e
        except _Damaged:
            raise
        except ValueError as e:
            raise ValueError(f"{where} is damaged: {e}") from e
        if (clip["name"], clip["latent"].shape, clip["caption"]) != (name, shape, caption):
            raise ValueError(f"{where} is not the clip {name!r} of its table")
        return clip

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Clips of one shape: latent float32 (N,C,T,h,w); caption, name, lists of N.

        Raises:
          IndexError: no such clip.
          ValueError: clips of several shapes (see `buckets`), or a damaged record.
        """
        index_N = np.asarray(indices, np.int64).reshape(-1)
        if index_N.size and not (index_N.min() >= 0 and index_N.max() < len(self)):
            raise IndexError(f"clip index must be in 0 .. {len(self) - 1}")
        if len(shapes := {self._rows[i][1] for i in index_N.tolist()}) != 1:
            raise ValueError(f"clips have shapes {sorted(shapes)}: a batch must have one")
        clips = [self._read(i) for i in index_N.tolist()]
        return {
            "latent": np.stack([clip["latent"] for clip in clips]),
            "caption": [clip["caption"] for clip in clips],
            "name": [clip["name"] for clip in clips],
        }

    def split(self, name: Literal["train", "heldout"], limit: int = 0) -> LatentCache:
        """The clips to train on, or the held-out ones, as a cache of its own with indices from 0.

        Training clips are in the order of their names. Held-out ones are in that of the hash, in which a longer list
        begins with the shorter.

        Args:
          name: "train" or "heldout".
          limit: only so many, the first by the hash, so that those of a smaller limit are among those of a larger
            one; 0 is all.

        Raises:
          ValueError: another name, or there are fewer clips than the limit; the message names data.limit.
        """
        if name not in ("train", "heldout"):
            raise ValueError(f"split = {name!r}: must be train or heldout")
        ranked = sorted(self._rows, key=lambda row: hashlib.sha256(row[0].encode()).digest())
        rows = ranked[: self._heldout] if name == "heldout" else ranked[self._heldout :]
        if not 0 <= limit <= len(rows):
            raise ValueError(
                f"data.limit={limit}: must be 0 (all) or a number of clips, of which there are {len(rows)}"
            )
        rows = rows[:limit] if limit else rows
        part = copy.copy(self)
        part._rows, part._heldout = rows if name == "heldout" else sorted(rows), 0
        return part

    def verify(self) -> None:
        """Read every shard of the cache and compare its SHA-256 with the index.

        Raises:
          ValueError: the first that differs.
        """
        for shard in self._shards:
            if _sha256(self.folder / shard["file"]) != shard["sha256"]:
                raise ValueError(
                    f"{_where(self.folder)} {shard['file']} is damaged: its SHA-256 is not that of the index"
                )
