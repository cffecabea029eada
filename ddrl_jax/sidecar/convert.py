"""Torch files <-> safetensors, tensor by tensor: `python -m ddrl_jax.sidecar convert`, or this file as a script.
What the sidecar's networks read their files with, too.

The trainer runs it in an environment with torch, which it has not itself. Torch and numpy only, nothing of the package:
as a script it needs no installed copy of it. A torch file is read with the weights-only unpickler, which makes tensors
and plain containers and refuses everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Torch's names of what safetensors can hold, and numpy's for as many bytes.
_DTYPES = {
    "F64": ("float64", "float64"),
    "F32": ("float32", "float32"),
    "F16": ("float16", "float16"),
    "BF16": ("bfloat16", "int16"),
    "F8_E4M3": ("float8_e4m3fn", "uint8"),
    "F8_E5M2": ("float8_e5m2", "uint8"),
    "I64": ("int64", "int64"),
    "I32": ("int32", "int32"),
    "I16": ("int16", "int16"),
    "I8": ("int8", "int8"),
    "U8": ("uint8", "uint8"),
    "BOOL": ("bool", "bool"),
}
# In the header of what is made here, beside which file it is of: another one when the same file gives other bytes.
_VERSION = "1"
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors package
_PROGRESS_BYTES = 2 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `convert`."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--to-safetensors", metavar="FILE", help="a torch file (.pt, .pth) to convert")
    which.add_argument("--to-torch", metavar="FILE", help="a .safetensors file to convert")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write")


def convert(args: argparse.Namespace) -> None:
    """Does what the options say. Raises ValueError, in one line, for what is not such a file, and OSError."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{sys.prefix} has no torch: {error}") from error
    if args.to_safetensors:
        to_safetensors(Path(args.to_safetensors), Path(args.out))
    else:
        to_torch(Path(args.to_torch), Path(args.out))


def _print(line: str) -> None:
    print(line, flush=True)


def to_safetensors(file: Path, out: Path) -> None:
    """The tensors of a state dict, bare or under "model" beside other things of a run.

    What is no tensor and quantiser state (`*_extra_state`) is left out with a line for each. Tensors that share memory
    are written one by one. Held in memory: one tensor that is not contiguous; the rest is mapped.
    """
    import torch

    tensors = read_torch(file)
    kinds = {getattr(torch, name): kind for kind, (name, _) in _DTYPES.items()}
    stat = file.stat()
    source = {"size": str(stat.st_size), "mtime_ns": str(stat.st_mtime_ns), "version": _VERSION}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | {f"source_{k}": v for k, v in source.items()}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in kinds:
            raise ValueError(f"{file}: {name} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors has not")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": kinds[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _whole(out) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        done = 0
        for tensor in tensors.values():
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            stream.write(data.data)
            if (done + data.size) // _PROGRESS_BYTES > done // _PROGRESS_BYTES:
                print(f"{file.name}: {(done + data.size) / 1e9:.1f} of {offset / 1e9:.1f} GB", flush=True)
            done += data.size


def read_torch(file: Path, say: Callable[[str], None] = _print) -> dict[str, torch.Tensor]:
    """The tensors of a state dict, bare or under "model", mapped where the file allows it; `say` is told what is left
    out. Raises ValueError, in one line, and OSError."""
    import torch

    try:
        # Files older than torch 1.6 are no zip and cannot be mapped.
        state = torch.load(str(file), map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a torch file of tensors alone, and whole: {_why(file, error)}") from error
    if isinstance(state, Mapping) and isinstance(state.get("model"), Mapping):
        for name in state:
            if name != "model":
                say(f"{file.name}: left out: {name}, beside the model")
        state = state["model"]
    if not isinstance(state, Mapping):
        raise ValueError(f"{file} does not hold a dict of tensors but a {type(state).__name__}")
    tensors = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not isinstance(name, str):
            say(f"{file.name}: left out: {name}, a {type(value).__name__}")
        elif name.endswith("_extra_state"):
            say(f"{file.name}: left out: {name}")
        else:
            tensors[name] = value
    if not tensors:
        raise ValueError(f"{file} does not hold a dict of tensors: there is none in it")
    return tensors


def _why(file: Path, error: Exception) -> str:
    """In words of our own: torch's go on with advice to load without the safeguard."""
    if file.stat().st_size == 0:
        return "it is empty"
    if "weights_only" in str(error) or "WeightsUnpickler" in str(error):
        return "it holds objects other than tensors, which are not loaded"
    with file.open("rb") as stream:
        zipped = stream.read(4) == b"PK\x03\x04"
    return "it is cut off or damaged" if zipped else "it is of another kind, or damaged"


def to_torch(file: Path, out: Path) -> None:
    """A flat state dict with the tensors of a safetensors file. They are mapped: memory holds none of them."""
    import torch

    tensors = _map(file)
    with _whole(out) as stream:
        torch.save(tensors, stream)


def _map(file: Path) -> dict[str, torch.Tensor]:
    import numpy as np
    import torch

    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            if length > _MAX_HEADER:
                raise ValueError(f"its header has {length} bytes; at most {_MAX_HEADER} are read")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        unknown = [(name, entry["dtype"]) for name, entry in header.items() if entry["dtype"] not in _DTYPES]
        # Copy on write, because torch has no read-only tensors; nothing writes.
        data = np.memmap(file, np.uint8, "c", offset=8 + length) if size > 8 + length else np.empty(0, np.uint8)
        tensors = {}
        for name, entry in header.items() if not unknown else ():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= data.size:
                raise ValueError(f"{name} ends behind the end of the file")
            if min(entry["shape"], default=0) < 0:
                raise ValueError(f"{name} has the shape {entry['shape']}")
            kind, same_size = _DTYPES[entry["dtype"]]
            # Each its own storage: one for all would be saved whole, header and all, and handed out with every tensor.
            tensor = torch.from_numpy(np.asarray(data[begin:end]).view(same_size).reshape(entry["shape"]))
            tensors[name] = tensor.view(getattr(torch, kind))
    except (struct.error, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
    for name, dtype in unknown:
        raise ValueError(f"{file}: {name} is a tensor of {dtype}; {', '.join(_DTYPES)} can be read")
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """A folder's one .safetensors file, or the shards that its index names. Raises ValueError, in one line."""
    indices, files = sorted(folder.glob("*.safetensors.index.json")), sorted(folder.glob("*.safetensors"))
    if len(indices) == 1:
        try:
            names = sorted(set(json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"].values()))
            odd = [name for name in names if name in ("", ".", "..") or re.search(r"[/\\\0]", name)]
            if not names:
                raise ValueError("it is empty")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{indices[0]} is not an index of safetensors shards: no weight_map") from error
        if odd:
            raise ValueError(f"{indices[0]} names {odd[0]!r}, which is no file of its folder: a plain name is needed")
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(f"{indices[0]} names files that are not there: {', '.join(absent)}")
        return [folder / name for name in names]
    if len(indices) > 1 or len(files) != 1:
        raise ValueError(
            f"{folder} holds {len(files)} .safetensors files and {len(indices)} indices; one file or one index is "
            "needed"
        )
    return files


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[IO[bytes]]:
    """A stream that becomes `file` when its block ends well: written beside it, then renamed."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ddrl_jax.sidecar convert", allow_abbrev=False)
    add_arguments(parser)
    try:
        convert(parser.parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"ddrl_jax.sidecar: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
