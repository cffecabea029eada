"""Torch files <-> safetensors, tensor by tensor: `python -m ddrl_jax.sidecar convert`, or this file as a script.

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
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
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


def to_safetensors(file: Path, out: Path) -> None:
    """The tensors of a state dict, bare or under "model" beside other things of a run.

    What is no tensor and quantiser state (`*_extra_state`) is left out with a line for each. Tensors that share memory
    are written one by one. Held in memory: one tensor that is not contiguous; the rest is mapped.
    """
    import torch

    tensors = _load(file)
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


def _load(file: Path) -> dict[str, torch.Tensor]:
    import torch

    try:
        # Files older than torch 1.6 are no zip and cannot be mapped.
        state = torch.load(str(file), map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
        # Torch's own message goes on with advice to load without the safeguard.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line for line in lines if line.startswith("WeightsUnpickler error")), (lines or [repr(error)])[0])
        raise ValueError(f"{file} is not a torch file of tensors alone, and whole: {why[:300]}") from error
    if isinstance(state, Mapping) and isinstance(state.get("model"), Mapping):
        for name in state:
            if name != "model":
                print(f"{file.name}: left out: {name}, beside the model", flush=True)
        state = state["model"]
    if not isinstance(state, Mapping):
        raise ValueError(f"{file} does not hold a dict of tensors but a {type(state).__name__}")
    tensors = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not isinstance(name, str):
            print(f"{file.name}: left out: {name}, a {type(value).__name__}", flush=True)
        elif name.endswith("_extra_state"):
            print(f"{file.name}: left out: {name}", flush=True)
        else:
            tensors[name] = value
    if not tensors:
        raise ValueError(f"{file} does not hold a dict of tensors: there is none in it")
    return tensors


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
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        # Copy on write, because torch has no read-only tensors; nothing writes.
        data = np.memmap(file, np.uint8, "c", offset=8 + length) if size > 8 + length else np.empty(0, np.uint8)
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if end > data.size:
                raise ValueError(f"{name} ends behind the end of the file")
            kind, same_size = _DTYPES[entry["dtype"]]
            # Each its own storage: one for all would be saved whole, header and all, and handed out with every tensor.
            tensor = torch.from_numpy(np.asarray(data[begin:end]).view(same_size).reshape(entry["shape"]))
            tensors[name] = tensor.view(getattr(torch, kind))
        return tensors
    except (struct.error, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


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
