"""Captions as a frozen table of random word vectors: the text encoder of runs that have none.

numpy only. A DiT's context projection turns the rows into what its cross-attention needs, so the vectors need no
training; they only have to differ.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class WordTable:
    """One frozen unit-variance vector a word.

    Attributes:
      vocabulary: the words, lower case, distinct.
      dim: length of a word's vector.
      length: words a caption is padded to.
      seed: of the table; the same seed and vocabulary give the same table.
    """

    vocabulary: tuple[str, ...]
    dim: int
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary", tuple(self.vocabulary))
        if len(set(self.vocabulary)) != len(self.vocabulary):
            raise ValueError("vocabulary holds a word twice; its words must be distinct")

    @functools.cached_property
    def _vectors(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        table = rng.standard_normal((len(self.vocabulary), self.dim)).astype(np.float32)
        return dict(zip(self.vocabulary, table, strict=True))

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """Captions -> float32 (N, length, dim), one vector a word in order, zeros after the last.

        Raises:
          ValueError: a word is not in the vocabulary, or a caption has more than `length` words.
        """
        out = np.zeros((len(captions), self.length, self.dim), np.float32)
        for row, caption in zip(out, captions, strict=True):
            words = caption.lower().split()
            if len(words) > self.length:
                raise ValueError(f"caption {caption!r} has {len(words)} words; at most {self.length} fit")
            for place, word in enumerate(words):
                if word not in self._vectors:
                    raise ValueError(f"caption {caption!r} has the word {word!r}, which is not in the vocabulary")
                row[place] = self._vectors[word]
        return out
