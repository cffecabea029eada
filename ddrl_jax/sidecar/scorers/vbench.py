"""Five of VBench's scores (Huang et al. 2024, arXiv 2311.17982), each in about [0,1], and their mean.

They need no prompt. Preprocessing and formulas are those of the package's modules of the same names, at its defaults.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import amt
from .backbones import MEAN, STD, fill, folder_of, read_state, torch_dtype
from .musiq import Musiq
from .qwen_video import levels

SCORES = ("subject_consistency", "background_consistency", "motion_smoothness", "aesthetic_quality", "imaging_quality")
DINO, CLIP_B, CLIP_L = "dino-vitb16", "clip-vit-base-patch32", "clip-vit-large-patch14"
AESTHETIC, MUSIQ, AMT = "sa_0_4_vit_l_14_linear.pth", "musiq_spaq_ckpt-358bb6af.pth", "amt-s.pth"
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SIDE, _LONGEST = 224, 512  # pixels: the shorter side for the transformers, the longer side for MUSIQ
_CHUNK = 16  # frames at a time


def shorter_side(frames_T3HW: Tensor, mode: str) -> Tensor:
    """Frames resized so that the shorter side has 224 pixels, without antialiasing, as VBench does."""
    h, w = frames_T3HW.shape[2:]
    size = tuple(int(_SIDE * side / min(h, w)) for side in (h, w))
    return F.interpolate(frames_T3HW, size, mode=mode, align_corners=False)


def centre(frames_T3HW: Tensor) -> Tensor:
    """The middle 224 x 224 pixels."""
    top, left = (round((side - _SIDE) / 2) for side in frames_T3HW.shape[2:])
    return frames_T3HW[:, :, top : top + _SIDE, left : left + _SIDE]


def standardise(frames_T3HW: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Levels of 0 to 255 -> mean 0, deviation 1 over the pictures of the training."""
    x = frames_T3HW / 255
    return (x - x.new_tensor(mean)[:, None, None]) / x.new_tensor(std)[:, None, None]


def consistency(features_TD: Tensor) -> float:
    """Mean over frames after the first of the cosine with the frame before and that with the first, none below 0."""
    f = F.normalize(features_TD.double(), dim=-1)
    before, first = F.cosine_similarity(f[1:], f[:-1]), F.cosine_similarity(f[1:], f[:1])
    return float((before.clamp(min=0) + first.clamp(min=0)).mean() / 2)


def dino_positions(embeddings: Any, tokens: Tensor, height: int, width: int) -> Tensor:
    """DINO's position embeddings for a picture of any size, by its own interpolation (vision_transformer.py).

    It scales by (patches + 0.1) / trained patches, where transformers' ViT asks for the size.
    """
    table, patch = embeddings.position_embeddings, embeddings.patch_embeddings.patch_size[0]
    side = math.isqrt(table.shape[1] - 1)
    if height == width and tokens.shape[1] == table.shape[1]:
        return table
    scale = tuple((pixels // patch + 0.1) / side for pixels in (height, width))
    lattice = table[:, 1:].float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    lattice = F.interpolate(lattice, scale_factor=scale, mode="bicubic").flatten(2).transpose(1, 2)
    return torch.cat([table[:, :1], lattice.to(table.dtype)], dim=1)


def pretrained(cls: Any, folder: Path, dtype: torch.dtype, **settings: Any) -> Any:
    """A transformers network with the weights of a folder. Raises ValueError where it does not hold them all."""
    net, info = cls.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True, **settings)
    if wrong := sorted(map(str, info["missing_keys"])):
        raise ValueError(f"weights: {str(folder)!r} lacks {len(wrong)} tensors, the first being {wrong[0]}")
    return net


def clip_vision(folder: Path, dtype: torch.dtype) -> Any:
    """The picture half of a CLIP."""
    from transformers import CLIPConfig, CLIPVisionModelWithProjection

    config: Any = CLIPConfig.from_pretrained(folder, local_files_only=True)
    config.vision_config.projection_dim = config.projection_dim
    return pretrained(CLIPVisionModelWithProjection, folder, dtype, config=config.vision_config)


class VBench:
    """Scores the five of SCORES and overall, their mean. Videos of 3 frames and 128 x 128 pixels at least."""

    name = "vbench"
    batch_size = 1
    requirements: tuple[str, ...] = ("pillow>=11", "transformers>=5")

    def load(self, weights: str | None, device: str, dtype: str = "float32") -> None:
        """weights: a folder with the folders DINO, CLIP_B and CLIP_L and the torch files AESTHETIC, MUSIQ and AMT.

        dtype is that of the three transformers; the other networks are in float32.
        """
        from transformers import ViTModel

        needs = f"{DINO}, {CLIP_B}, {CLIP_L} (folders), {AESTHETIC}, {MUSIQ} and {AMT}"
        folder = folder_of(weights, needs, *(f"{name}/config.json" for name in (DINO, CLIP_B, CLIP_L)))
        self.device, self.dtype = device, torch_dtype(dtype)
        # DINO's own epsilon: the config on the hub has another.
        self.dino = pretrained(ViTModel, folder / DINO, self.dtype, add_pooling_layer=False, layer_norm_eps=1e-6)
        self.dino.embeddings.interpolate_pos_encoding = partial(dino_positions, self.dino.embeddings)
        self.clip_b, self.clip_l = (clip_vision(folder / name, self.dtype) for name in (CLIP_B, CLIP_L))
        self.aesthetic, self.amt = nn.Linear(self.clip_l.config.projection_dim, 1), amt.AmtS()
        fill(self.aesthetic, read_state(folder, AESTHETIC), AESTHETIC)
        fill(self.amt, read_state(folder, AMT), AMT)
        self.musiq = Musiq.of(read_state(folder, MUSIQ))
        for net in (self.dino, self.clip_b, self.clip_l, self.aesthetic, self.musiq, self.amt):
            net.eval().to(device)

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {name: [] for name in (*SCORES, "overall")}
        for video in videos:
            frames = levels(video)
            if len(frames) < 3 or min(frames.shape[2:]) < amt.MIN_SIDE:
                raise ValueError(
                    f"a video of {len(frames)} frames of {tuple(frames.shape[2:])} pixels; 3 frames of "
                    f"{amt.MIN_SIDE} x {amt.MIN_SIDE} are needed at least"
                )
            frames = frames.float().to(self.device)
            five = [getattr(self, name)(frames) for name in SCORES]
            for name, value in zip(scores, [*five, sum(five) / len(five)], strict=True):
                scores[name].append(value)
        return scores

    def subject_consistency(self, frames_T3HW: Tensor) -> float:
        """`consistency` of DINO's class tokens."""
        x = standardise(shorter_side(frames_T3HW, "bilinear"), _IMAGENET_MEAN, _IMAGENET_STD).to(self.dtype)
        tokens = [self.dino(c, interpolate_pos_encoding=True).last_hidden_state[:, 0] for c in x.split(_CHUNK)]
        return consistency(torch.cat(tokens))

    def clip_features(self, clip: Any, frames_T3HW: Tensor) -> Tensor:
        x = standardise(centre(shorter_side(frames_T3HW, "bicubic")), MEAN, STD).to(self.dtype)
        return torch.cat([clip(c).image_embeds for c in x.split(_CHUNK)]).float()

    def background_consistency(self, frames_T3HW: Tensor) -> float:
        """`consistency` of the picture features of CLIP ViT-B/32."""
        return consistency(self.clip_features(self.clip_b, frames_T3HW))

    def aesthetic_quality(self, frames_T3HW: Tensor) -> float:
        """LAION's linear aesthetic predictor on the normalised features of CLIP ViT-L/14, a tenth of its mean."""
        features = F.normalize(self.clip_features(self.clip_l, frames_T3HW), dim=-1)
        return float(self.aesthetic(features).double().mean() / 10)

    def imaging_quality(self, frames_T3HW: Tensor) -> float:
        """A hundredth of MUSIQ's mean score of frames whose longer side has 512 pixels at most."""
        h, w = frames_T3HW.shape[2:]
        x = frames_T3HW
        if max(h, w) > _LONGEST:
            size = tuple(int(_LONGEST / max(h, w) * side) for side in (h, w))
            x = F.interpolate(x, size, mode="bilinear", align_corners=False)
        scores = [self.musiq(c / 255) for c in x.split(_CHUNK)]
        return float(torch.cat(scores).double().mean() / 100)

    def motion_smoothness(self, frames_T3HW: Tensor) -> float:
        """1 - the mean difference, in parts of 255, of every other frame from AMT-S's guess from those around it."""
        padded, where = amt.pad(frames_T3HW[::2] / 255)
        differences = []
        for before, after, real in zip(padded[:-1], padded[1:], frames_T3HW[1::2], strict=False):
            guess = self.amt(before[None], after[None])[0][(slice(None), *where)]
            differences.append((torch.floor(guess * 255) - real).abs().double().mean())
        return float(1 - torch.stack(differences).mean() / 255)
