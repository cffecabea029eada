"""The OCR reward: how much of the word that the prompt asks for a text recogniser reads in the picture.

The recogniser is RapidOCR's (PP-OCRv6, Apache-2.0, its weights are in the package), on onnxruntime and one CPU thread.
Sub-scores: `text`, one minus the normalised edit distance, and `confidence`, the recogniser's own. The text that is
asked for is read off the prompt.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_QUOTED = re.compile(r'"([^"]+)"')
_LETTER = re.compile(r"([a-z0-9])\d?")
_ROWS = 48  # of the recogniser's input


def wanted_text(prompt: str) -> str:
    """The text that a prompt asks for.

    What stands in double quotes, as in 'a sign that says "cake"', or else the single letters that the prompt ends with,
    with or without their places: "the word c a k e" and "the word c1 a2 k3 e4" are both "cake".

    Raises:
      ValueError: the prompt names no text.
    """
    quoted = _QUOTED.search(prompt)
    if quoted and comparable(quoted[1]):
        return quoted[1]
    letters: list[str] = []
    for token in reversed(prompt.lower().split()):
        match = _LETTER.fullmatch(token)
        if match is None:
            break
        letters.append(match[1])
    if not letters:
        raise ValueError(f"prompt {prompt!r:.80} names no text; 'the word c1 a2 k3 e4' or 'a sign \"cake\"' would")
    return "".join(reversed(letters))


def comparable(text: str) -> str:
    """What is compared: ASCII letters and digits in lower case. A recogniser of many scripts finds some in noise."""
    return "".join(c for c in text.lower() if c.isascii() and c.isalnum())


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions of a character that make b of a (Levenshtein 1966)."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def similarity(read: str, wanted: str) -> float:
    """1 - edit distance / length of the longer one, of what is `comparable`: 1 the same, 0 nothing in common."""
    a, b = comparable(read), comparable(wanted)
    longest = max(len(a), len(b))
    return 1.0 - edit_distance(a, b) / longest if longest else 1.0


def pictures(videos_BCTHW: Any) -> np.ndarray:
    """Clips in [-1,1] -> uint8 (B,T,H,W,3); the mean of the channels, unless there are three."""
    x = videos_BCTHW if videos_BCTHW.shape[1] == 3 else videos_BCTHW.mean(1, keepdim=True).expand(-1, 3, -1, -1, -1)
    levels = ((x.clamp(-1, 1) + 1) * 127.5).round()
    return np.ascontiguousarray(levels.permute(0, 2, 3, 4, 1).byte().cpu().numpy())


class Ocr:
    """Scores text and confidence, both in [0,1], means over a clip's frames."""

    # Both engines: they are light and share an environment, one being the other's judge.
    requirements = ("rapidocr==3.10.0", "ddddocr==1.6.1", "onnxruntime>=1.20")
    batch_size = 1  # pictures are read one by one: nothing to gain, and no batch-mates

    def load(self, weights: str | None, device: str) -> None:
        """Has its weights from the package; runs on the CPU whatever the device."""
        try:
            from rapidocr import RapidOCR
        except ImportError as error:
            raise ValueError(missing(error)) from error
        threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
        # Narrowest input of 48 x 48: pictures are not padded to the 320 columns of a line of text, half the time.
        shape = {"Rec.rec_img_shape": [3, _ROWS, _ROWS]}
        self._engine: Any = RapidOCR(params={**threads, **shape, "Global.log_level": "error", "Global.text_score": 0.0})

    def read(self, picture_HW3: np.ndarray) -> tuple[str, float]:
        """The text of one uint8 picture and the recogniser's confidence in it."""
        found = self._engine(picture_HW3, use_det=False, use_cls=False, use_rec=True)
        return ("", 0.0) if not found.txts else (found.txts[0], float(found.scores[0]))

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {"text": [], "confidence": []}
        for frames, prompt in zip(pictures(videos), prompts, strict=True):
            wanted, read = wanted_text(prompt), [self.read(frame) for frame in frames]
            scores["text"].append(float(np.mean([similarity(text, wanted) for text, _ in read])))
            # Confidence in what is no letter or digit is none.
            scores["confidence"].append(float(np.mean([sure if comparable(text) else 0.0 for text, sure in read])))
        return scores


def missing(error: ImportError) -> str:
    """What to say where a package is not there."""
    return f"{error.name} is not in this environment; add it with: python -m ddrl_jax.sidecar build --scorer ocr"
