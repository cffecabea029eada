"""LAION's aesthetic predictor V2 (christophschuhmann/improved-aesthetic-predictor): a mean rating from 1 to 10, of a
picture alone.

    overall = head(image / |image|)      head: linear 768-1024-128-64-16-1 on CLIP ViT-L/14's image embedding

Weights: openai/clip-vit-large-patch14 (revision 32bd64288804d66eefd0ccbe215aa642df71cc41, as public code pins it), with
sac+logos+ava1-l14-linearMSE.pth of that repository beside it (commit 6934dd81792f086e613a121dbce43082cb8be85e; sha256
21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0, as public code pins it).
"""

from __future__ import annotations

from typing import Any

from .backbones import CLIP_FILES, Clip, cropped_pixels, fill, folder_of, pixels_of, read_state, score_head

_HEAD = "sac+logos+ava1-l14-linearMSE.pth"


class Aesthetic:
    """Scores overall, the mean over evenly chosen frames."""

    name, batch_size, frames = "aesthetic", 8, 4
    requirements: tuple[str, ...] = ("pillow>=11", "transformers>=5")

    def load(self, weights: str | None, device: str, *, dtype: str = "float32") -> None:
        folder = folder_of(weights, f"{CLIP_FILES}, and {_HEAD}", "config.json")
        self.clip = Clip(folder, device, dtype)
        self.head = score_head(self.clip.model.config.projection_dim)
        fill(self.head, {k.removeprefix("layers."): v for k, v in read_state(folder, _HEAD).items()}, _HEAD)
        self.head.eval().double()

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        # OpenAI's preparation is torchvision's.
        pixels = pixels_of(videos, self.frames, lambda p: cropped_pixels(p, self.clip.size, centre="round"))
        rating = self.head(self.clip.image(pixels))
        return {"overall": rating.view(len(prompts), -1).mean(1).tolist()}
