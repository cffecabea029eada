"""Features of captions on disk: computed once by --mode=prepare, so that the text tower needs no memory in training.

One safetensors file a distinct caption, named by its hash; an index, there before the first of them, says what made
them. A caption of 512 tokens has 103 MB in bfloat16, so they are read a batch at a time and never held together.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ddrl_jax import files

_INDEX = "index.json"
_AGAIN = "remove it and run --mode=prepare"


class TextCache:
    """A folder of caption features (S, D), kept as bfloat16 bits.

    Args:
      folder: made by `add`.
      length, dim: S and D.
      fingerprint: what the features are a function of; those of another one are refused.

    Raises:
      ValueError: the folder holds features that were made otherwise, or some without an index.
    """

    def __init__(self, folder: str | os.PathLike[str], *, length: int, dim: int, fingerprint: dict[str, Any]) -> None:
        self.folder, self.length, self.dim = Path(folder), length, dim
        self.fingerprint = {**fingerprint, "length": length, "dim": dim}
        self._index = self.folder / _INDEX
        if not self._index.is_file():
            if any(self.folder.glob("*.safetensors")):
                raise ValueError(f"text_encoder.where='cached': {self.folder} holds features and no {_INDEX}; {_AGAIN}")
            return
        try:
            there = json.loads(self._index.read_text())
            if not isinstance(there, dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:
            raise ValueError(
                f"text_encoder.where='cached': {self._index} is damaged ({error}); remove {self.folder} and run "
                "--mode=prepare"
            ) from error
        for name, value in self.fingerprint.items():
            if there.get(name) != value:
                raise ValueError(
                    f"text_encoder.where='cached': {self.folder} holds features whose {name} is {there.get(name)!r}, "
                    f"not {value!r}; {_AGAIN}, or take another data.path"
                )

    def _file(self, caption: str) -> Path:
        return self.folder / f"{hashlib.sha256(caption.encode()).hexdigest()[:32]}.safetensors"

    def missing(self, captions: Sequence[str]) -> list[str]:
        """The distinct captions without features, or with a file too short for them, in order."""
        least = 2 * self.length * self.dim

        def whole(file: Path) -> bool:
            return file.is_file() and file.stat().st_size > least

        return [c for c in dict.fromkeys(captions) if not whole(self._file(c))]

    def add(self, caption: str, features_SD: np.ndarray) -> None:
        """Stores a caption's features, whole or not at all."""
        if features_SD.shape != (self.length, self.dim):
            raise ValueError(f"features are {features_SD.shape}, not {(self.length, self.dim)}")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._index.is_file():
            with files.whole(self._index) as partial:
                partial.write_text(json.dumps(self.fingerprint, indent=1))
        bits = np.ascontiguousarray(features_SD.astype(ml_dtypes.bfloat16, copy=False)).view(np.uint16)
        with files.whole(self._file(caption)) as partial:
            save_file({"features": bits}, partial, metadata={"crc32": str(zlib.crc32(bits.tobytes()))})

    def verify(self, captions: Sequence[str]) -> None:
        """Reads the features of all captions that have some. Raises ValueError for the first damaged file."""
        absent = set(self.missing(captions))
        for caption in dict.fromkeys(captions):
            if caption not in absent:
                self.embed([caption])

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """Captions -> bfloat16 (N, S, D).

        Raises:
          ValueError: a caption has no features, or damaged ones.
        """
        out = np.empty((len(captions), self.length, self.dim), ml_dtypes.bfloat16)
        for row, caption in zip(out, captions, strict=True):
            file = self._file(caption)
            try:
                with safe_open(file, "np") as tensors:
                    found = tensors.get_slice("features")
                    kind, shape = found.get_dtype(), tuple(found.get_shape())
                    if (kind, shape) != ("U16", row.shape):
                        raise ValueError(f"its features are {kind} {shape}, not U16 {row.shape}")
                    bits = tensors.get_tensor("features")
                    if (tensors.metadata() or {}).get("crc32") != str(zlib.crc32(bits.tobytes())):
                        raise ValueError("its checksum is not that of its features")
                    row[...] = bits.view(ml_dtypes.bfloat16)
            except FileNotFoundError:
                raise ValueError(
                    f"text_encoder.where='cached': {self.folder} has no features of the caption {caption[:60]!r}; "
                    "run --mode=prepare with the same config"
                ) from None
            except (SafetensorError, OSError, ValueError) as error:
                raise ValueError(f"text_encoder.where='cached': {file} is damaged ({error}); {_AGAIN}") from error
        return out
