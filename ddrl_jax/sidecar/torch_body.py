"""Reads the body of a request that was made by `torch.save(tensor)`: one dense tensor and nothing else.

Never runs what a pickle names. The archive is looked at first (stored, not packed; few entries; no other class or
function than those of a tensor), then `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import io
import pickletools
import zipfile

import torch

MAGIC = b"PK\x03\x04"  # of a zip archive
_GLOBALS = {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "collections OrderedDict"}
_DTYPES = {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8}
_ENTRIES, _PICKLE_BYTES = 16, 1 << 14  # a tensor needs 7 and about 200


def read_tensor(content: memoryview) -> torch.Tensor:
    """The tensor, on the CPU, detached; it may be a view. Raises ValueError, in one line, for anything else."""
    stream = io.BytesIO(content)
    try:
        _check_archive(stream)
        stream.seek(0)
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # hostile bytes make unpicklers raise almost anything
        raise ValueError(f"not a tensor as torch.save writes it ({error})") from None
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise ValueError(f"torch.save holds a {type(tensor).__name__}; one dense tensor is needed")
    if tensor.dtype not in _DTYPES:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in _DTYPES))
        raise ValueError(f"dtype {tensor.dtype} is not one of {names}")
    # A slice comes with all of its storage; strides of 0 would make much of little.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"shape {tuple(tensor.shape)} has more elements than were sent")
    return tensor.detach()


def _check_archive(stream: io.BytesIO) -> None:
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        if len(entries) > _ENTRIES:
            raise ValueError(f"{len(entries)} entries in the archive")
        if any(e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries):
            raise ValueError("packed entries in the archive")
        pickles = [e for e in entries if e.filename.endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > _PICKLE_BYTES:
            raise ValueError("its data.pkl is that of something larger")
        for operation, name, _ in pickletools.genops(archive.read(pickles[0])):
            storage = isinstance(name, str) and name.startswith("torch ") and name.endswith("Storage")
            named = operation.name in ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4")
            if named and name not in _GLOBALS and not (operation.name == "GLOBAL" and storage):
                raise ValueError(f"it names {name!r:.80}")
