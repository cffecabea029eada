"""Statistics of generated clips that no scorer and no judge is needed for: what they look like, in a few numbers.

Hacked pictures drift in ways a viewer names at once (over-sharpened, garish, frozen, washed out), and each of these
moves one of the numbers here. numpy only; must not know where the clips come from.

Dims: N clips, C channels (1 or 3), T frames, H rows, W columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NAMES = ("edge_density", "saturation", "temporal_difference", "brightness", "contrast")


def image_statistics(video_NCTHW: np.ndarray) -> dict[str, np.ndarray]:
    """Five statistics of each clip, on pixel values mapped from [-1, 1] to [0, 1]. Grey is the mean over channels.

    - edge_density: mean magnitude of the grey image's gradient, sqrt(dx^2 + dy^2) of forward differences, over frames
      and the (H - 1)(W - 1) pixels that have both; per pixel. NaN where H or W is 1.
    - saturation: mean of HSV's (max - min) / max over the channels, 0 where max is 0. NaN for one channel, which has
      no colour.
    - temporal_difference: mean |x_{t+1} - x_t| over channels, pixels and neighbouring frames. NaN for one frame.
    - brightness: mean of the grey image.
    - contrast: mean distance of the grey image's pixels from the mean of their own frame.

    Args:
      video_NCTHW: (N, C, T, H, W) float, in [-1, 1]; a clip with a NaN has NaN statistics.

    Returns:
      {name: (N,) float64}, with the names of NAMES.

    Raises:
      ValueError: another number of dimensions or channels, integers, or values outside [-1, 1].
    """
    video: np.ndarray = np.asarray(video_NCTHW)
    if video.ndim != 5 or video.shape[1] not in (1, 3) or 0 in video.shape[1:]:
        raise ValueError(f"video = {video.shape}: must be (N, C, T, H, W) with C 1 or 3 and no empty clips")
    if not np.issubdtype(video.dtype, np.floating):
        raise ValueError(f"video = {video.dtype}: must be floating point in [-1, 1]")
    largest = float(np.nanmax(np.abs(video), initial=0.0))
    if largest > 1.0 + 1e-3:  # a decoder's rounding is no error
        raise ValueError(f"video = values up to {largest:g} in size: must be in [-1, 1]")
    # Clip by clip: the temporaries of a large video are several times its size.
    rows = [_of_clip((clip.astype(np.float64) + 1.0) * 0.5) for clip in video]
    return {name: np.array([row[name] for row in rows], np.float64) for name in NAMES}


def _of_clip(x_CTHW: np.ndarray) -> dict[str, Any]:
    grey_THW = x_CTHW.mean(0)
    dx, dy = np.diff(grey_THW, axis=2)[:, :-1], np.diff(grey_THW, axis=1)[:, :, :-1]
    high, low = x_CTHW.max(0), x_CTHW.min(0)
    span = np.divide(high - low, high, out=np.where(high > 0, np.nan, high - low), where=high > 0)
    return {
        "edge_density": np.sqrt(dx**2 + dy**2).mean() if dx.size else np.nan,
        "saturation": span.mean() if len(x_CTHW) > 1 else np.nan,
        "temporal_difference": np.abs(np.diff(x_CTHW, axis=1)).mean() if x_CTHW.shape[1] > 1 else np.nan,
        "brightness": grey_THW.mean(),
        "contrast": np.abs(grey_THW - grey_THW.mean((1, 2), keepdims=True)).mean(),
    }
