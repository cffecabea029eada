"""HPS v2 (Wu et al. 2023, arXiv 2306.09341): a CLIP ViT-H/14 trained on people's preferences.

    overall = cos(image, prompt)      hpsv2/img_score.py of tgxs002/HPSv2; about 0.2 to 0.35

A picture is fitted whole into the square: the longest side resized, the rest filled with black (the package's
transform with `light_augmentation`), where other CLIPs crop the middle. The package resizes a tensor, which since
torchvision 0.17 means with antialias; so do we. It computes under fp16 autocast: ours is float32 unless told otherwise.
Its tokenizer repairs broken Unicode and HTML entities in the prompt first (ftfy); ours does not.

Weights: HPS_v2.1_compressed.pt, else HPS_v2_compressed.pt, of xswu/HPSv2 (revision
697403c78157020a1ae59d23f111aa58ced35b0a; sha256 of v2.1
c57a38fb4a2f7e7c15bf00da2ea377cdf165448b4dd1052a484c215a998c9837; both as public code pins them), with config.json and
the tokenizer files of laion/CLIP-ViT-H-14-laion2B-s32B-b79K (revision 1c2b8495b28150b8a4922ee1c8edee224c284c0c) beside
it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from .backbones import Clip, folder_of, normalised, pixels_of, read_state, unit_tensor

_FILES = ("HPS_v2.1_compressed.pt", "HPS_v2_compressed.pt")


def padded_pixels(picture_HW3: np.ndarray, size: int) -> Tensor:
    """uint8 (H,W,3) -> normalised (3,S,S), the whole picture in the middle of a black square."""
    unit_3HW = unit_tensor(picture_HW3)
    h, w = unit_3HW.shape[1:]
    if max(h, w) != size:
        new = [round(side * (size / max(h, w))) for side in (h, w)]
        unit_3HW = F.interpolate(unit_3HW[None], new, mode="bicubic", align_corners=False, antialias=True)[0]
    dy, dx = (size - side for side in unit_3HW.shape[1:])
    return normalised(F.pad(unit_3HW, (dx // 2, dx - dx // 2, dy // 2, dy - dy // 2)))


class HpsV2:
    """Scores overall, the mean over evenly chosen frames."""

    name, batch_size, frames = "hps_v2", 8, 4
    requirements: tuple[str, ...] = ("pillow>=11", "transformers>=5")

    def load(self, weights: str | None, device: str, *, dtype: str = "float32") -> None:
        needs = f"{_FILES[0]}, and config.json and tokenizer of laion/CLIP-ViT-H-14-laion2B-s32B-b79K,"
        folder = folder_of(weights, needs, "config.json")
        self.clip = Clip(folder, device, dtype, read_state(folder, *_FILES))

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        pixels = pixels_of(videos, self.frames, lambda p: padded_pixels(p, self.clip.size))
        return {"overall": self.clip.cosines(self.clip.image(pixels), prompts).mean(1).tolist()}
