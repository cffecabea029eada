"""Video and chat as Qwen2-VL and Qwen2.5-VL read them: what video_align and cosmos_reason1 share.

A video is cut into patches of 2 frames x 14 x 14 pixels; 2 x 2 of them make one token of the language model. What is
done to pixels and text is what transformers' Qwen2-VL processor does, without torchvision, which that one needs.
"""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .backbones import MEAN, STD, folder_of

log = logging.getLogger("ddrl_jax.sidecar")

FRAMES, PATCH, MERGE = 2, 14, 2
FACTOR = PATCH * MERGE  # pixels along one side of a token
VIDEO_TOKEN = "<|video_pad|>"


def frames_per_second(info: dict[str, Any]) -> float:
    """`video_fps` of one entry of a request's `video_infos`. Raises ValueError where there is none."""
    fps = info.get("video_fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise ValueError(f"video_infos: video_fps is {fps!r}; this scorer needs the frames per second, above 0")
    return float(fps)


def levels(video_CTHW: Tensor) -> Tensor:
    """A clip in [-1,1] -> uint8 (T,3,H,W). Raises ValueError unless it has 1 or 3 channels and 2 frames or more."""
    c, t = video_CTHW.shape[:2]
    if c not in (1, 3):
        raise ValueError(f"videos of {c} channels; 1 or 3 are needed")
    if t < FRAMES:
        raise ValueError(f"a video of {t} frame; this scorer needs at least {FRAMES}")
    pixels = ((video_CTHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return pixels.expand(3, -1, -1, -1).transpose(0, 1)


def fit(height: int, width: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """Nearest size of whole tokens, sides in about the same proportion, with min_pixels to max_pixels pixels.

    As qwen_vl_utils' `smart_resize`. Raises ValueError for a picture over 200 times longer than wide.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"videos of {height} x {width} pixels; one side may be 200 times the other at most")
    h, w = (max(FACTOR, round(side / FACTOR) * FACTOR) for side in (height, width))
    if h * w > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        h, w = (max(FACTOR, math.floor(side / shrink / FACTOR) * FACTOR) for side in (height, width))
    elif h * w < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        h, w = (math.ceil(side * grow / FACTOR) * FACTOR for side in (height, width))
    return h, w


def resize(frames_TCHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Levels resized as torchvision resizes uint8: bicubic with antialiasing, then clamped and rounded."""
    resized = F.interpolate(frames_TCHW.float(), size, mode="bicubic", antialias=True, align_corners=False)
    return resized.clamp(0, 255).round()


def patches(frames_TCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Levels 0 to 255, sides multiples of 28 -> patches (N, 3*2*14*14), normalised, and their grid (1,3): t, h, w.

    Patches of one token are neighbours. An odd last frame is taken twice.
    """
    x = frames_TCHW.float() / 255
    x = (x - x.new_tensor(MEAN)[:, None, None]) / x.new_tensor(STD)[:, None, None]
    if len(x) % FRAMES:
        x = torch.cat([x, x[-1:]])
    t, h, w = len(x) // FRAMES, x.shape[2] // PATCH, x.shape[3] // PATCH
    x = x.reshape(t, FRAMES, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)
    return x, torch.tensor([[t, h, w]])


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def read_prompt(weights: str | None, source: str, sha256: str) -> str:
    """`prompt.txt` of the weights' folder: what the model was trained to be asked, which is not ours to ship.

    A text of another sha256 is used all the same, with a warning. Raises ValueError where there is none, in one line
    that names its `source`.
    """
    file = folder_of(weights, f"prompt.txt, {source},", "prompt.txt") / "prompt.txt"
    content = file.read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        log.warning("weights: %s is not the released prompt (its sha256 is %s, not %s)", file, digest, sha256)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"weights: {file} is no UTF-8 text; it should be {source}") from error


def is_plain(tokenizer: Any, prompt: str) -> bool:
    """Whether a prompt is text only: a special token in it would be read as one, and pass for video or for a reward."""
    return not any(t.special and t.content in prompt for t in tokenizer.added_tokens_decoder.values())


def chat(tokenizer: Any, system: str, text: str, grid_1x3: Tensor) -> Tensor:
    """Token ids (1,S) of a system message, a user's message of a video and a text, and the start of an answer."""
    video = f"<|vision_start|>{VIDEO_TOKEN * (int(grid_1x3.prod()) // MERGE**2)}<|vision_end|>"
    messages = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{video}{text}<|im_end|>\n"
    return torch.tensor([tokenizer(messages + "<|im_start|>assistant\n").input_ids])
