"""A second OCR engine, the judge of the first: for evaluations, never to be trained on.

ddddocr (MIT, its weights are in the package) was made by other people from other data than RapidOCR, so that a picture
which fools the reward has no reason to fool it. It confuses upper and lower case: both are read as lower case.
Sub-scores: `text`, one minus the normalised edit distance as in `ocr`, and `exact`, 1 where the word is read right.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from .ocr import comparable, missing, pictures, similarity, wanted_text


class OcrJudge:
    """Scores text and exact, both in [0,1], means over a clip's frames."""

    # Both engines: they are light and share an environment, one being the other's judge.
    requirements = ("rapidocr==3.10.0", "ddddocr==1.6.1", "onnxruntime>=1.20")
    batch_size = 1

    def load(self, weights: str | None, device: str) -> None:
        """Has its weights from the package; runs on the CPU whatever the device."""
        try:
            import onnxruntime
            from ddddocr import DdddOcr
        except ImportError as error:
            raise ValueError(missing(error)) from error
        self._engine = DdddOcr(show_ad=False)
        # It takes a thread a core, which under load is many times slower than one, and offers no way to ask for one.
        one = onnxruntime.SessionOptions()
        one.intra_op_num_threads = one.inter_op_num_threads = 1
        network = Path(sys.modules["ddddocr"].__path__[0]) / "common_old.onnx"
        self._engine.ocr_engine.session = onnxruntime.InferenceSession(network, one, ["CPUExecutionProvider"])

    def read(self, picture_HW3: np.ndarray) -> str:
        """The text of one uint8 picture."""
        from PIL import Image

        return self._engine.classification(Image.fromarray(picture_HW3))

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {"text": [], "exact": []}
        for frames, prompt in zip(pictures(videos), prompts, strict=True):
            wanted, read = wanted_text(prompt), [self.read(frame) for frame in frames]
            scores["text"].append(float(np.mean([similarity(text, wanted) for text in read])))
            scores["exact"].append(float(np.mean([comparable(text) == comparable(wanted) for text in read])))
        return scores
