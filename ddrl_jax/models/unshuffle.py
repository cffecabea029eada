"""A lossless latent codec for small videos: space to depth, normalised. What a VAE is to large ones."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import numpy as np

Array = TypeVar("Array", np.ndarray, jax.Array)


@dataclasses.dataclass(frozen=True)
class Unshuffle:
    """Moves every factor x factor square of a channel into channels: channel index (c*f + dy)*f + dx.

    Attributes:
      factor: f, side of the square, > 0.
      mean: of the pixels, subtracted before.
      std: of the pixels, > 0, divided by.
    """

    factor: int
    mean: float
    std: float

    def __post_init__(self) -> None:
        if self.factor < 1 or not self.std > 0:
            raise ValueError(f"unshuffle: factor {self.factor} and std {self.std} must be positive")

    def latent_shape(self, video_CTHW: tuple[int, ...]) -> tuple[int, int, int, int]:
        """(C, T, H, W) of a clip -> (C*f*f, T, H/f, W/f) of its latent."""
        C, T, H, W = video_CTHW
        return C * self.factor**2, T, H // self.factor, W // self.factor

    def video_shape(self, latent_CTHW: tuple[int, ...]) -> tuple[int, int, int, int]:
        """The inverse of `latent_shape`."""
        C, T, h, w = latent_CTHW
        return C // self.factor**2, T, h * self.factor, w * self.factor

    def encode(self, video_BCTHW: Array) -> Array:
        """Video (B, C, T, H, W) in [-1, 1] -> latent (B, C*f*f, T, H/f, W/f) of mean 0 and std 1, the same dtype.

        Raises:
          ValueError: H or W is not a multiple of f.
        """
        B, C, T, H, W = video_BCTHW.shape
        f = self.factor
        if H % f or W % f:
            raise ValueError(f"video is {H} x {W}; both must be multiples of the unshuffle factor {f}")
        v = (video_BCTHW - self.mean) / self.std
        v = v.reshape(B, C, T, H // f, f, W // f, f).transpose(0, 1, 4, 6, 2, 3, 5)
        return v.reshape(B, C * f * f, T, H // f, W // f)

    def decode(self, latent_BCTHW: Array) -> Array:
        """The inverse of `encode`: latent (B, C*f*f, T, h, w) -> video (B, C, T, h*f, w*f), not clamped.

        Raises:
          ValueError: the channels are not a multiple of f*f.
        """
        B, C, T, H, W = latent_BCTHW.shape
        f = self.factor
        if C % (f * f):
            raise ValueError(f"latent has {C} channels; they must be a multiple of {f * f}")
        v = latent_BCTHW.reshape(B, C // (f * f), f, f, T, H, W).transpose(0, 1, 4, 5, 2, 6, 3)
        return v.reshape(B, C // (f * f), T, H * f, W * f) * self.std + self.mean
