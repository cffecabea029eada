"""JPEG compressibility: the fewer bytes a picture takes, the better. No weights; hacked at once, so good for tests.

Minus the size in kilobytes (1000 bytes) of the picture as a JPEG of quality 95, as DDPO has it (arXiv 2305.13301,
kvablack/ddpo-pytorch, ddpo_pytorch/rewards.py). Weigh it with -1 to pay for detail instead.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from .backbones import frames_of


class Jpeg:
    """Scores overall, in kilobytes at or below 0; the mean over evenly chosen frames."""

    name, batch_size, frames = "jpeg", 1, 4
    requirements: tuple[str, ...] = ("pillow>=11",)

    def load(self, weights: str | None, device: str) -> None:
        """Has no weights and runs on the CPU."""

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        chosen = frames_of(videos, self.frames)
        return {"overall": [float(np.mean([-kilobytes(p) for p in sample])) for sample in chosen]}


def kilobytes(picture_HW3: np.ndarray) -> float:
    """Of a uint8 (H,W,3) picture."""
    out = io.BytesIO()
    Image.fromarray(picture_HW3).save(out, format="JPEG", quality=95)
    return out.tell() / 1000
