"""Mean pixel value: the smallest scorer there is. For smoke tests; the first thing any policy can learn to raise."""

from __future__ import annotations

from typing import Any


class Brightness:
    batch_size = 1

    def load(self, weights: str | None, device: str) -> None:
        """Has no weights."""

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        return {"overall": videos.double().mean(dim=(1, 2, 3, 4)).tolist()}
