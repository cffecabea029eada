"""Rewards for clips of moving digits: text alignment, visual quality and motion quality.

Each is in units of its standard deviation on real clips; `overall` is their weighted sum, as VideoAlign has it. The
nets are small and saw a third of the scans only: a policy that climbs them hard enough finds clips that score
above real ones and are not digits any more. That is their purpose.
Weights are made by `sidecar build --scorer digits --data DIR --out DIR`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS_FILE, CONFIG_FILE = "digits.safetensors", "digits.json"
SUB_SCORES = ("text_alignment", "visual_quality", "motion_quality")


class Nets(nn.Module):
    """Classifiers of digit and direction and a real-or-not discriminator for clips of one size.

    Clips are (B,T,H,W), [-1,1]; H and W multiples of 4.
    """

    def __init__(self, frames: int, height: int, width: int, digits: int = 10, directions: int = 9):
        super().__init__()
        cells = (height // 4) * (width // 4)
        self.digit = _conv_net(1, 12, 24, cells, digits)
        self.direction = _conv_net(frames, 16, 24, cells, directions)
        self.real = _conv_net(frames, 16, 24, cells, 1)

    def forward(self, clips_BTHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of digit (B,10), direction (B,9) and real (B,)."""
        b, t, h, w = clips_BTHW.shape
        per_frame = self.digit(clips_BTHW.reshape(b * t, 1, h, w))
        digit = per_frame.reshape(b, t, -1).mean(1)
        return digit, self.direction(clips_BTHW), self.real(clips_BTHW)[:, 0]


def _conv_net(channels: int, a: int, b: int, cells: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, a, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(b * cells, out),
    )  # fmt: skip


NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIRECTION_WORDS = ("up", "down", "left", "right", "still")


def read_prompt(prompt: str) -> tuple[str, str] | None:
    """ "the digit seven drifting up and to the left" -> ("seven", "up left"). None where there is no telling.

    Verbs and articles do not count, so that a prompt never seen in training is understood too.
    """
    words = prompt.lower().replace(".", " ").replace(",", " ").split()
    numbers = [w for w in words if w in NUMBERS]
    direction = " ".join(w for w in DIRECTION_WORDS if w in words)
    return (numbers[0], direction) if len(numbers) == 1 and direction else None


def gray(videos_BCTHW: Tensor) -> Tensor:
    """(B,C,T,H,W) -> (B,T,H,W)."""
    return videos_BCTHW.mean(1)


def log_odds(logits_BK: Tensor, index_B: Tensor) -> Tensor:
    """log p/(1-p) of one class: unlike log p it does not flatten out where the classifier is sure."""
    rest = logits_BK.masked_fill(F.one_hot(index_B, logits_BK.shape[1]).bool(), -torch.inf)
    return logits_BK.gather(1, index_B[:, None])[:, 0] - torch.logsumexp(rest, 1)


# One unit of deviation; and how much of it is not told from perfect. Bilinear rendering and 8-bit rounding leave
# a little on real clips: without logarithm and floor their std is tiny, and the slightest noise on a
# generated clip a catastrophe in units of it (z of -10 to -60 was measured).
_POSITION, _SIZE, _FLOOR = 0.15, 0.10, 0.02  # pixels, relative, squared units


def motion_smoothness(clips_BTHW: Tensor) -> Tensor:
    """Minus the log of how far the ink is from gliding along a straight line without changing. (B,).

    Second differences over time of its centre (pixels), first differences of the logs of its mass and spread. The
    logarithm keeps clips that are far off within reach of the other sub-scores.
    """
    _, t, h, w = clips_BTHW.shape
    ink = ((clips_BTHW + 1) / 2 - 0.05).clamp(min=0) + 1e-4  # a faint haze in the background is not ink
    y = torch.arange(h, dtype=ink.dtype)[:, None]
    x = torch.arange(w, dtype=ink.dtype)[None, :]
    mass = ink.sum((2, 3))
    cy, cx = (ink * y).sum((2, 3)) / mass, (ink * x).sum((2, 3)) / mass
    spread_y = ((ink * (y - cy[..., None, None]) ** 2).sum((2, 3)) / mass).sqrt()
    spread_x = ((ink * (x - cx[..., None, None]) ** 2).sum((2, 3)) / mass).sqrt()
    centre, size = torch.stack([cy, cx]), torch.stack([mass, spread_y, spread_x])
    bend = centre.diff(n=2, dim=2).square().sum((0, 2)) / max(t - 2, 1)
    change = size.log().diff(dim=2).square().sum((0, 2)) / (t - 1)
    return -torch.log(bend / _POSITION**2 + change / _SIZE**2 + _FLOOR)


def raw_scores(nets: Nets, clips_BTHW: Tensor, digit_B: Tensor, direction_B: Tensor) -> dict[str, Tensor]:
    """Sub-scores before they are put into units, each (B,)."""
    digit, direction, real = nets(clips_BTHW)
    return {
        "text_alignment": log_odds(digit, digit_B) + log_odds(direction, direction_B),
        "visual_quality": real,
        "motion_quality": motion_smoothness(clips_BTHW),
    }


class Digits:
    """Scores text_alignment, visual_quality, motion_quality and overall; 0 is the mean of real clips."""

    batch_size = 16

    def load(self, weights: str | None, device: str) -> None:
        from safetensors.torch import load_file

        how = "python -m ddrl_jax.sidecar build --scorer digits --data CLIPS --out DIR"
        if not weights or not (Path(weights) / CONFIG_FILE).is_file():
            raise ValueError(f"weights: no {CONFIG_FILE} in {weights!r}; make it with: {how}")
        try:
            config = json.loads((Path(weights) / CONFIG_FILE).read_text())
            self.shape = tuple(config["shape_THW"])
            self.digits: dict[str, int] = config["digits"]
            self.directions: dict[str, int] = config["directions"]
            self.mean: dict[str, float] = config["mean"]
            self.std: dict[str, float] = config["std"]
            self.weight: dict[str, float] = config["overall_weight"]
            self.nets = Nets(*self.shape)
            self.nets.load_state_dict(load_file(Path(weights) / WEIGHTS_FILE))
        except Exception as error:
            why = type(error).__name__
            raise ValueError(
                f"weights: the digits scorer in {weights!r} is damaged ({why}); make it with: {how}"
            ) from error
        self.device = device
        self.nets.eval().to(device)

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        clips = gray(videos.to(self.device))
        if tuple(clips.shape[1:]) != self.shape:
            raise ValueError(f"clips of (T,H,W) {tuple(clips.shape[1:])}; it was trained on {self.shape}")
        wanted = [self._classes(p) for p in prompts]
        digit, direction = torch.tensor(wanted, device=self.device).T
        raw = raw_scores(self.nets, clips, digit.contiguous(), direction.contiguous())
        scores = {name: (raw[name].double() - self.mean[name]) / self.std[name] for name in SUB_SCORES}
        scores["overall"] = sum((self.weight[n] * scores[n] for n in SUB_SCORES), torch.zeros(()))
        return {name: values.tolist() for name, values in scores.items()}

    def _classes(self, prompt: str) -> tuple[int, int]:
        number, direction = read_prompt(prompt) or ("", "")
        if number not in self.digits or direction not in self.directions:
            raise ValueError(
                f"prompt {prompt!r:.80} names no digit and direction of the digits scorer; "
                "'a seven moving up and to the left' would"
            )
        return self.digits[number], self.directions[direction]
