"""Safetensors on disk: a file or a folder as mapped arrays, and files written tensor by tensor.

Not with the package: it has no numpy bfloat16, and a 14B file must be mapped, not loaded, and written without ever
being whole in memory. Knows nothing of networks.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ddrl_jax.files import whole

Tensors = Mapping[str, np.ndarray]

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_MAX_HEADER = 100_000_000  # bytes, as in the package
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Spec(NamedTuple):
    """A tensor before its numbers are known."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file, of a folder with one, or of a folder with shards and their index; mapped, not loaded.

    Raises ValueError when there is no such thing, or when it is damaged.
    """
    if path.is_file():
        if is_shard(path):
            raise ValueError(f"{path} is one shard of several: give the folder with config.json and all weights")
        return read_file(path)
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; a .safetensors file or a folder with one is needed")
    indices, files = sorted(path.glob("*.safetensors.index.json")), sorted(path.glob("*.safetensors"))
    # What `torch_files` made of a torch file is that file's, not the folder's.
    files = [file for file in files if not file.with_suffix("").is_file()]
    if len(indices) == 1:
        try:
            names = json.loads(indices[0].read_text())["weight_map"]
            shards = sorted(set(names.values()))
            odd = [name for name in shards if not _is_plain(name)]
            files = [path / name for name in shards]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{indices[0]} is not an index of safetensors shards: no weight_map") from error
        if odd:
            raise ValueError(f"{indices[0]} names {odd[0]!r}, which is no file of its folder: a plain name is needed")
        if absent := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{indices[0]} names files that are not there: {', '.join(absent)}")
        tensors = {name: tensor for file in files for name, tensor in read_file(file).items()}
        if absent := sorted(set(names) - set(tensors)):
            raise ValueError(f"{indices[0]} names tensors that its files do not hold: {', '.join(absent)}")
        return tensors
    if len(indices) > 1 or len(files) != 1:
        raise ValueError(
            f"{path} holds {len(files)} .safetensors files and {len(indices)} indices; one file or one index is needed"
        )
    return read_file(files[0])


def _is_plain(name: str) -> bool:
    """Whether a name leads to nothing outside its folder."""
    return name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def is_shard(file: Path) -> bool:
    """Whether a file's name says that it is one of several: x-00001-of-00003.safetensors."""
    return bool(re.search(r"-\d+-of-(?!0*1\.)\d+\.safetensors$", file.name))


def read_file(file: Path) -> dict[str, np.ndarray]:
    """The tensors of one file, as views of its mapped pages. Raises ValueError when it is not a whole one."""
    header, begin = _header(file)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if isinstance(entry, dict) and isinstance(dtype := entry.get("dtype"), str) and dtype not in _DTYPES:
            raise ValueError(f"{file}: {name} is a tensor of {dtype}; {', '.join(_DTYPES)} can be read")
    try:
        size = file.stat().st_size
        data = np.memmap(file, np.uint8, "r", offset=begin) if size > begin else np.empty(0, np.uint8)
        tensors = {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            if not 0 <= first <= end <= data.size:
                raise ValueError(f"{name} ends behind the end of the file")
            if min(entry["shape"], default=0) < 0:
                raise ValueError(f"{name} has the shape {entry['shape']}")
            tensors[name] = data[first:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return tensors
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def read_metadata(file: Path) -> dict[str, str]:
    """The free text entries in a file's header. Raises ValueError when it has no readable header."""
    metadata = _header(file)[0].get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size - 8:
                raise ValueError("its header is longer than the file")
            if length > _MAX_HEADER:
                raise ValueError(f"its header has {length} bytes; at most {_MAX_HEADER} are read")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        return header, 8 + length
    except (struct.error, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_file(
    file: Path, specs: Sequence[Spec], tensors: Iterable[np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one file, whole or not at all: the header first, then each tensor as `tensors` yields it.

    Args:
      file: the file; its folder exists.
      specs: of the tensors, in their order.
      tensors: one array a spec, of its dtype and shape; one is held at a time.
      metadata: free text for the header.
    """
    # diffusers and transformers ask for the entry "format".
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with whole(file) as partial, partial.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for spec, tensor in zip(specs, tensors, strict=True):
            if (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
                raise AssertionError(f"{spec} got {tensor.dtype} {tensor.shape}")
            stream.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def write_folder(
    folder: Path, stem: str, specs: Sequence[Spec], tensors: Iterable[np.ndarray], max_shard_bytes: int
) -> None:
    """Writes `stem`.safetensors, or shards of at most `max_shard_bytes` (one tensor at least) and their index.

    Tensors as in `write_file`. What the folder had of `stem` before is removed first.
    """
    shards: list[list[Spec]] = [[]]
    for spec in specs:
        if shards[-1] and sum(s.nbytes for s in shards[-1]) + spec.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(spec)
    count, stream = len(shards), iter(tensors)
    names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        names = [f"{stem}.safetensors"]
    # Before the first new one: a write that is cut short must not leave a mixture that can be read.
    for stale in folder.glob(f"{stem}*.safetensors*"):
        stale.unlink()
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, (next(stream) for _ in shard))
    if count > 1:
        weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": weight_map}
        write_text(folder / f"{stem}.safetensors.index.json", json.dumps(index, indent=2))


def write_text(file: Path, text: str) -> None:
    """Writes a small file, whole or not at all."""
    with whole(file) as partial:
        partial.write_text(text)
