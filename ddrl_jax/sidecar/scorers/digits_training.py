"""Trains the digits scorer from a file of captioned clips. Torch, one thread, deterministic, under a minute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from . import trained
from .digits import CONFIG_FILE, SUB_SCORES, WEIGHTS_FILE, Nets, raw_scores, read_prompt

STEPS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 900, 96, 2e-3, 1e-2
# Keeps the logits of easy clips within a few units, so that no sub-score drowns the others in the sum.
LABEL_SMOOTHING = 0.1
OVERALL_WEIGHT = dict.fromkeys(SUB_SCORES, 1.0)


def read_clips(path: str) -> dict[str, np.ndarray]:
    """`video` uint8 (N,T,H,W,C), `digit` and `direction` (N,), `caption` (N,) from an .npz, or a folder's clips.npz."""
    file = Path(path) / "clips.npz" if Path(path).is_dir() else Path(path)
    wanted = {"video", "digit", "direction", "caption"}
    try:
        with np.load(file, allow_pickle=False) as stored:
            if not wanted <= set(stored.files):
                raise ValueError(f"it lacks {', '.join(sorted(wanted - set(stored.files)))}")
            clips = {name: stored[name] for name in wanted}
    except Exception as error:
        raise ValueError(f"data: {str(file)!r} holds no clips ({error})") from None
    video, n = clips["video"], len(clips["video"])
    if video.ndim != 5 or video.dtype != np.uint8 or n < 100:
        raise ValueError(
            f"data: video {video.dtype} {video.shape} in {str(file)!r}; uint8 (N,T,H,W,C), N at least 100, is needed"
        )
    if video.shape[2] % 4 or video.shape[3] % 4 or video.shape[1] < 2:
        raise ValueError(
            f"data: clips of shape {video.shape[1:]}; at least 2 frames and multiples of 4 pixels are needed"
        )
    if any(len(clips[name]) != n for name in wanted):
        raise ValueError(f"data: columns of different lengths in {str(file)!r}")
    return clips


def read_captions(clips: dict[str, np.ndarray]) -> tuple[dict[str, int], dict[str, int]]:
    """Class of each number word and of each direction ("up left"). ValueError where captions and labels disagree."""
    digits: dict[str, int] = {}
    directions: dict[str, int] = {}
    for caption, digit, direction in zip(clips["caption"], clips["digit"], clips["direction"], strict=True):
        words = read_prompt(str(caption))
        if (
            words is None
            or digits.setdefault(words[0], int(digit)) != digit
            or directions.setdefault(words[1], int(direction)) != direction
        ):
            raise ValueError(f"data: caption {str(caption)!r} does not tell digit {digit} and direction {direction}")
    return dict(sorted(digits.items())), dict(sorted(directions.items()))


def fakes(real_BTHW: Tensor, rng: torch.Generator) -> Tensor:
    """What is not a clip of a digit: for each real clip one that is spoilt, in one of eight ways."""
    b, t, h, w = real_BTHW.shape

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand((b, 1, 1, 1), generator=rng) * (high - low) + low

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    other = real_BTHW[torch.randperm(b, generator=rng)]
    y, x = torch.arange(h).float()[:, None], torch.arange(w).float()
    cy, cx = uniform(0, h - 1), uniform(0, w - 1)
    time = torch.arange(t).float()[None, :, None, None]
    dy, dx = uniform(-1, 1), uniform(-1, 1)
    blob = torch.exp(-(((y - cy - dy * time) / uniform(1, 3)) ** 2) - ((x - cx - dx * time) / uniform(1, 3)) ** 2)
    smooth = F.interpolate(noise(b, t, h // 4, w // 4), (h, w), mode="bilinear")
    hole = torch.rand((b, 1, h, w), generator=rng) < uniform(0.1, 0.4)
    kinds: list[Callable[[], Tensor]] = [
        lambda: real_BTHW + uniform(0.1, 0.8) * noise(b, t, h, w),  # noisy
        lambda: F.avg_pool2d(real_BTHW, 3, 1, 1) * uniform(0.7, 1.3),  # blurred
        lambda: torch.lerp(real_BTHW, other, uniform(0.3, 0.7)),  # two in one
        lambda: torch.maximum(real_BTHW, other),
        lambda: torch.where(time < t // 2, real_BTHW, other),  # one becomes another
        lambda: 2 * uniform(0.5, 1.5) * blob - 1,
        lambda: uniform(0.2, 0.8) * smooth + uniform(-1, 0.2),  # clouds
        lambda: torch.where(hole, -real_BTHW, real_BTHW),  # flipped pixels
    ]
    kind = torch.randint(len(kinds), (b, 1, 1, 1), generator=rng)
    spoilt = real_BTHW
    for i, make in enumerate(kinds):
        spoilt = torch.where(kind == i, make(), spoilt)
    return spoilt.clamp(-1, 1)


def train(clips: dict[str, np.ndarray], seed: int = 0, steps: int = STEPS) -> Nets:
    """Cross entropy with label smoothing for all three nets. Prints "progress DONE/TOTAL", for whoever shows a bar."""
    video, digit, direction = tensors(clips)
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        nets = Nets(*video.shape[1:])
    optimizer = torch.optim.AdamW(nets.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps)
    for step in range(steps):
        if step % 20 == 0:
            print(f"progress {step}/{steps}", flush=True)
        rows = torch.randint(len(video), (BATCH,), generator=rng)
        real = video[rows]
        digit_logits, direction_logits, real_logits = nets(real)
        fake_logits = nets.real(fakes(real, rng))[:, 0]
        on = torch.full((BATCH,), 1 - LABEL_SMOOTHING)
        loss = (
            F.cross_entropy(digit_logits, digit[rows], label_smoothing=LABEL_SMOOTHING)
            + F.cross_entropy(direction_logits, direction[rows], label_smoothing=LABEL_SMOOTHING)
            + F.binary_cross_entropy_with_logits(real_logits, on)
            + F.binary_cross_entropy_with_logits(fake_logits, 1 - on)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return nets.eval()


def tensors(clips: dict[str, np.ndarray]) -> tuple[Tensor, Tensor, Tensor]:
    """Clips (N,T,H,W) in [-1,1], digit (N,), direction (N,)."""
    video = torch.from_numpy(clips["video"].astype(np.float32).mean(-1)) / 127.5 - 1
    return video, torch.from_numpy(clips["digit"]).long(), torch.from_numpy(clips["direction"]).long()


@torch.inference_mode()
def accuracy(nets: Nets, clips: dict[str, np.ndarray], seed: int = 1) -> dict[str, float]:
    """Share of clips whose digit, whose direction, and whose being real or spoilt is told right."""
    video, digit, direction = tensors(clips)
    digit_logits, direction_logits, real = nets(video)
    spoilt = nets(fakes(video, torch.Generator().manual_seed(seed)))[2]
    return {
        "digit": float((digit_logits.argmax(1) == digit).float().mean()),
        "direction": float((direction_logits.argmax(1) == direction).float().mean()),
        "real": float(((real > 0).float().mean() + (spoilt <= 0).float().mean()) / 2),
    }


def main(data: str, out: str, *, seed: int = 0, threads: int = 1, steps: int = STEPS) -> None:
    """Reads clips, trains on nine in ten, measures units and accuracy on the tenth, writes safetensors and JSON."""
    torch.set_num_threads(threads)
    clips = read_clips(data)
    digits, directions = read_captions(clips)
    held = np.arange(len(clips["video"])) % 10 == 9
    nets = train({k: v[~held] for k, v in clips.items()}, seed, steps)
    rest = {k: v[held] for k, v in clips.items()}
    with torch.inference_mode():
        raw = raw_scores(nets, *tensors(rest))
    config = {
        "shape_THW": list(clips["video"].shape[1:4]),
        "mean": {k: float(v.double().mean()) for k, v in raw.items()},
        "std": {k: float(v.double().std()) for k, v in raw.items()},
        "overall_weight": OVERALL_WEIGHT,
        "accuracy_unseen_clips": accuracy(nets, rest),
        "seed": seed,
        "digits": digits,
        "directions": directions,
    }
    folder = trained.write(out, nets, WEIGHTS_FILE, config, CONFIG_FILE)
    told = ", ".join(f"{k} {v:.1%}" for k, v in config["accuracy_unseen_clips"].items())  # type: ignore[attr-defined]
    print(f"digits scorer in {folder}: on clips it was not trained on it tells {told}")
