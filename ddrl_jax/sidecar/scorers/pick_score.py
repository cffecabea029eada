"""PickScore (Kirstain et al. 2023, arXiv 2305.01569): a CLIP-H trained on which of two pictures people picked.

    overall = exp(logit_scale) cos(image, prompt)      as in the README of yuvalkirstain/PickScore; about 20
    cosine  = cos(image, prompt)

Weights: yuvalkirstain/PickScore_v1 (revision a4e4367c6dfa7288a00c550414478f865b875800) with the tokenizer files of
laion/CLIP-ViT-H-14-laion2B-s32B-b79K (revision 1c2b8495b28150b8a4922ee1c8edee224c284c0c) beside it. The revisions are
those that public code pins; no file hash was read.
"""

from __future__ import annotations

from typing import Any

from .backbones import CLIP_FILES, Clip, cropped_pixels, folder_of, pixels_of


class PickScore:
    """Scores overall and cosine, means over evenly chosen frames."""

    name, batch_size, frames = "pick_score", 8, 4
    requirements: tuple[str, ...] = ("pillow>=11", "transformers>=5")

    def load(self, weights: str | None, device: str, *, dtype: str = "float32") -> None:
        self.clip = Clip(folder_of(weights, CLIP_FILES, "config.json"), device, dtype)

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        # Prepared as transformers' image processor does, which PickScore was trained with.
        pixels = pixels_of(videos, self.frames, lambda p: cropped_pixels(p, self.clip.size, centre="floor"))
        cosine_B = self.clip.cosines(self.clip.image(pixels), prompts).mean(1)
        return {"overall": (self.clip.scale * cosine_B).tolist(), "cosine": cosine_B.tolist()}
