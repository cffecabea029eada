"""Features of captions on disk: computed once by --mode=prepare, so that the text tower needs no memory in training.

One safetensors file a distinct caption, named by its hash; an index says what made them. A caption of 512 tokens has
103 MB in bfloat16, so they are read a batch at a time and never held together.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

_INDEX = "index.json"


class TextCache:
    """A folder of caption features (S, D), kept as bfloat16 bits.

    Args:
      folder: made by `add`.
      length, dim: S and D.
      fingerprint: what the features are a function of; those of another one are refused.

    Raises:
      ValueError: the folder holds features that were made otherwise.
    """

    def __init__(self, folder: str | os.PathLike[str], *, length: int, dim: int, fingerprint: dict[str, Any]) -> None:
        self.folder, self.length, self.dim = Path(folder), length, dim
        self.fingerprint = {**fingerprint, "length": length, "dim": dim}
        index = self.folder / _INDEX
        if not index.is_file():
            return
        try:
            there = json.loads(index.read_text())
        except ValueError as error:
            raise ValueError(
                f"text_encoder.where='cached': {index} is damaged ({error}); remove {self.folder}"
            ) from error
        for name, value in self.fingerprint.items():
            if there.get(name) != value:
                raise ValueError(
                    f"text_encoder.where='cached': {self.folder} holds features whose {name} is {there.get(name)!r}, "
                    f"not {value!r}; remove it and run --mode=prepare, or take another data.path"
                )

    def _file(self, caption: str) -> Path:
        return self.folder / f"{hashlib.sha256(caption.encode()).hexdigest()[:32]}.safetensors"

    def missing(self, captions: Sequence[str]) -> list[str]:
        """The distinct captions without features, in order."""
        return [c for c in dict.fromkeys(captions) if not self._file(c).is_file()]

    def add(self, caption: str, features_SD: np.ndarray) -> None:
        """Stores a caption's features, whole or not at all."""
        if features_SD.shape != (self.length, self.dim):
            raise ValueError(f"features are {features_SD.shape}, not {(self.length, self.dim)}")
        self.folder.mkdir(parents=True, exist_ok=True)
        bits = np.ascontiguousarray(features_SD.astype(ml_dtypes.bfloat16)).view(np.uint16)
        partial = self.folder / f".{os.getpid()}.partial"
        save_file({"features": bits}, partial)
        partial.replace(self._file(caption))
        if not (self.folder / _INDEX).is_file():
            (self.folder / ".index").write_text(json.dumps(self.fingerprint, indent=1))
            (self.folder / ".index").replace(self.folder / _INDEX)

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """Captions -> bfloat16 (N, S, D).

        Raises:
          ValueError: a caption has no features, or damaged ones.
        """
        out = np.empty((len(captions), self.length, self.dim), ml_dtypes.bfloat16)
        for row, caption in zip(out, captions, strict=True):
            file = self._file(caption)
            try:
                bits = load_file(file)["features"]
                row[...] = bits.view(ml_dtypes.bfloat16)
            except FileNotFoundError:
                raise ValueError(
                    f"text_encoder.where='cached': {self.folder} has no features of the caption {caption[:60]!r}; "
                    "run --mode=prepare with the same config"
                ) from None
            except (SafetensorError, KeyError, ValueError) as error:
                raise ValueError(f"text_encoder.where='cached': {file} is damaged ({error}); remove it") from error
        return out
