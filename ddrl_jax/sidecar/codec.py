"""From what came over the wire to video in [-1, 1]. The codec is chosen where the server starts, never by a request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Codec(Protocol):
    """What makes video of latents."""

    def decode(self, latents_BCTHW: np.ndarray) -> np.ndarray:
        """Latents (B, C, t, h, w) -> video (B, 3 or 1, T, H, W), a new float32 array, not clipped; ValueError if they
        do not fit. The same latents give the same video whatever else is in the batch."""


@dataclass(frozen=True)
class Unshuffle:
    """Inverse of the trainer's lossless space-to-depth codec.

    Latent channel (c*factor + dy)*factor + dx holds pixel (y*factor + dy, x*factor + dx) of channel c, normalised as
    (v - mean) / std.
    """

    factor: int
    mean: float = 0.0
    std: float = 1.0

    def decode(self, latents_BCTHW: np.ndarray) -> np.ndarray:
        """Latents (B, C*f*f, T, h, w) -> video (B, C, T, h*f, w*f), float32, not clipped."""
        f = self.factor
        b, c, t, h, w = latents_BCTHW.shape
        if c % (f * f):
            raise ValueError(f"latent channels: {c} is no multiple of factor^2 = {f * f} (codec unshuffle)")
        x = latents_BCTHW.astype(np.float32) * np.float32(self.std) + np.float32(self.mean)
        x = x.reshape(b, c // (f * f), f, f, t, h, w)
        return x.transpose(0, 1, 4, 5, 2, 6, 3).reshape(b, c // (f * f), t, h * f, w * f)


@dataclass(frozen=True)
class Identity:
    """Latents that are video already, in [-1, 1]."""

    def decode(self, latents_BCTHW: np.ndarray) -> np.ndarray:
        return latents_BCTHW.astype(np.float32)


@dataclass(frozen=True)
class Wan:
    """A Wan2.1 autoencoder's decoder.

    Attributes:
      network: a `wan_vae.WanDecoder`.
      tile: latent rows and columns of the squares that a frame is decoded in; 0: whole frames.
    """

    network: Any
    tile: int = 0

    def decode(self, latents_BCTHW: np.ndarray) -> np.ndarray:
        """Latents (B, 16, t, h, w) -> video (B, 3, 1 + 4(t-1), 8h, 8w), float32, not clipped; one clip at a time."""
        return self.network.decode(latents_BCTHW, self.tile)


_FIELDS: dict[str, dict[str, Callable[[str], Any]]] = {
    "identity": {},
    "unshuffle": {"factor": int, "mean": float, "std": float},
    "wan": {"path": str, "dtype": str, "tile": int},
}


def parse_codec(text: str, device: str = "cpu") -> Codec:
    """The codec of `--codec`, ready to use. Raises ValueError in one line.

    Args:
      text: `identity`, `unshuffle:factor=2,mean=-0.7,std=0.6` or
        `wan:path=FILE_OR_FOLDER,dtype=float32|bfloat16,tile=N` (only the path is needed; it may hold "=" and ",", but
        not the beginning of another option, as ",tile=").
      device: where a network runs, as torch names it.
    """
    name, _, rest = text.partition(":")
    if name not in _FIELDS:
        raise ValueError(f"codec: {text!r}; one of {', '.join(_FIELDS)} is needed")
    known, values = _FIELDS[name], dict[str, Any]()
    for part in filter(None, re.split(r",(?=(?:path|dtype|tile)=)" if name == "wan" else ",", rest)):
        key, _, value = part.partition("=")
        if key not in known:
            raise ValueError(f"codec: {name} has no option {key!r}; it has {', '.join(known) or 'none'}")
        try:
            values[key] = known[key](value)
        except ValueError:
            raise ValueError(f"codec: {key}={value!r} is not a number of type {known[key].__name__}") from None
    if name == "identity":
        return Identity()
    if name == "wan":
        return _wan(text, device, **values)
    if values.get("factor", 0) < 1:
        raise ValueError(f"codec: {text!r}; unshuffle needs factor=N with N at least 1")
    if not np.isfinite(values.get("mean", 0.0)) or not 0 < values.get("std", 1.0) < np.inf:
        raise ValueError(f"codec: {text!r}; mean must be finite, std finite and above 0")
    return Unshuffle(**values)


def _wan(text: str, device: str, path: str = "", dtype: str = "float32", tile: int = 0) -> Wan:
    if not path:
        raise ValueError(f"codec: {text!r}; wan needs path=FILE_OR_FOLDER")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"codec: dtype={dtype!r}; float32 or bfloat16 is needed")
    if tile < 0:
        raise ValueError(f"codec: tile={tile}; 0 (none) or a number of latent rows and columns is needed")
    import torch  # here: the other codecs, and whoever only reads the option, need none

    from . import wan_vae

    try:
        return Wan(wan_vae.load(path, device=device, dtype=getattr(torch, dtype)), tile)
    except ValueError as error:
        raise ValueError(f"codec: {error}") from error


def to_video(array: np.ndarray, media_type: str, codec: Codec) -> np.ndarray:
    """Any media type -> float32 (B, C, T, H, W) in [-1, 1] (latents are clipped: scorers only know pictures)."""
    if media_type == "latent":
        video = codec.decode(array)
        return np.clip(video, -1.0, 1.0, out=video)
    if media_type == "image":
        array = array.transpose(0, 3, 1, 2)[:, :, None]
    video = np.array(array, np.float32, order="C")
    video /= np.float32(127.5)
    video -= np.float32(1.0)
    return video
