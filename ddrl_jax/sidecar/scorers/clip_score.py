"""CLIPScore (Hessel et al. 2021, arXiv 2104.08718, eq. 1): how well a picture fits its caption by a CLIP.

    overall = 2.5 max(cos(image, "A photo depicts " + prompt), 0)      the paper's, with its prefix (jmhessel/clipscore)
    cosine  = cos(image, prompt)      what most reinforcement learning uses: no prefix, not cut off, so it still tells
                                      two bad pictures apart

Weights: openai/clip-vit-base-patch32 (the paper's; revision 3d74acf9a28c67741b2f4f2ea7635f0aaf6f0268 is what public
code pins; no file hash was read), or any other CLIP in transformers' layout.
"""

from __future__ import annotations

from typing import Any

from .backbones import CLIP_FILES, Clip, cropped_pixels, folder_of, pixels_of


class ClipScore:
    """Scores overall in [0,2.5] and cosine in [-1,1]; means over evenly chosen frames."""

    name, batch_size, frames = "clip_score", 8, 4
    requirements: tuple[str, ...] = ("pillow>=11", "transformers>=5")

    def load(self, weights: str | None, device: str, *, dtype: str = "float32") -> None:
        self.clip = Clip(folder_of(weights, CLIP_FILES, "config.json"), device, dtype)

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        # OpenAI's preparation is torchvision's.
        pixels = pixels_of(videos, self.frames, lambda p: cropped_pixels(p, self.clip.size, centre="round"))
        image = self.clip.image(pixels)
        depicts_BF = self.clip.cosines(image, [f"A photo depicts {prompt}" for prompt in prompts])
        return {
            "overall": (2.5 * depicts_BF.clamp(min=0)).mean(1).tolist(),
            "cosine": self.clip.cosines(image, prompts).mean(1).tolist(),
        }
