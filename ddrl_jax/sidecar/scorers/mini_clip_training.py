"""Trains mini-CLIP's two projections on emoji with their names. Torch, one thread, deterministic.

Pictures: the Noto and the Twemoji sheet of the npm package emoji-datasource, every emoji that both have, without skin
tones, on white. Captions: their names in the PyPI package emoji. One concept in five is held out of training and tells
how well pictures and names find each other. Most of the time goes into the features, once; the training itself is a
symmetric contrastive loss on them (CLIP, Radford et al. 2021).
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from . import trained
from .mini_clip import CONFIG_FILE, WEIGHTS_FILE, Features, MiniClip, Projections, pixels

VENDORS = ("google", "twitter")
TILE = 32  # pixels; each has a border of one
STEPS, BATCH, LEARNING_RATE, WEIGHT_DECAY, TEMPERATURE = 400, 512, 1e-3, 0.05, 0.07
_HOW = "emoji-datasource-16.0.0.tgz as `npm pack emoji-datasource@16.0.0` fetches it, or that package's folder,"


def read_emoji(path: str) -> tuple[list[str], dict[str, np.ndarray]]:
    """Captions, and each vendor's pictures uint8 (N,32,32,3) in the same order. Raises ValueError in one line."""
    try:
        import emoji
    except ImportError as error:
        raise ValueError(f"this environment lacks emoji; pip install {' '.join(MiniClip.requirements)}") from error
    try:
        read = _files(Path(path))
        rows = json.loads(read("emoji.json"))
        sheets = {v: Image.open(io.BytesIO(read(f"img/{v}/sheets/{TILE}.png"))).convert("RGBA") for v in VENDORS}
        rows = sorted((r for r in rows if all(r[f"has_img_{v}"] for v in VENDORS)), key=lambda r: r["unified"])
        named = [(_caption(emoji.EMOJI_DATA, r["unified"]), r["sheet_x"], r["sheet_y"]) for r in rows]
    except (OSError, ValueError, KeyError, TypeError, tarfile.TarError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"data: {path!r} is no emoji package ({why}); {_HOW} is needed") from error
    named = [row for row in named if row[0]]
    if len(named) < 20:
        raise ValueError(f"data: {len(named)} emoji with a name in {path!r}; at least 20 are needed")
    pictures = {v: np.stack([_tile(sheets[v], x, y) for _, x, y in named]) for v in VENDORS}
    return [caption for caption, _, _ in named], pictures


def _files(path: Path) -> Callable[[str], bytes]:
    """Reads a file of the package by its name: from its folder, or from npm's archive of it."""
    if path.is_dir():
        return lambda name: (path / name).read_bytes()
    with tarfile.open(path) as archive:
        wanted = ["emoji.json", *(f"img/{v}/sheets/{TILE}.png" for v in VENDORS)]
        found = {name: archive.extractfile(f"package/{name}") for name in wanted}
        contents = {name: member.read() for name, member in found.items() if member is not None}
    return contents.__getitem__


def _caption(names: dict[str, Any], code_points: str) -> str:
    """ "1F436" -> "dog face"; "" where there is no name."""
    entry = names.get("".join(chr(int(code, 16)) for code in code_points.split("-")))
    return entry["en"].strip(":").replace("_", " ").replace("-", " ") if entry else ""


def _tile(sheet: Image.Image, column: int, row: int) -> np.ndarray:
    left, top = column * (TILE + 2) + 1, row * (TILE + 2) + 1
    tile = Image.new("RGBA", (TILE, TILE), "white")
    tile.alpha_composite(sheet.crop((left, top, left + TILE, top + TILE)))
    return np.asarray(tile.convert("RGB"))


def train(
    image_VND: Tensor, text_ND: Tensor, seed: int = 0, steps: int = STEPS, say: Callable[[], None] = lambda: None
) -> Projections:
    """Projections under which a concept's picture, of a vendor drawn anew each time, and its name find each other.

    image_VND (vendors,N,1280) and text_ND (N,384) are features; `say` is called after each step.
    """
    every = image_VND.flatten(0, 1)
    with torch.random.fork_rng():  # dropout and the first weights come from the global generator
        torch.manual_seed(seed)
        net = Projections()
        net.mean, net.std = every.mean(0), every.std(0) + 1e-3
        optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps)
        batch = min(BATCH, len(text_ND))
        own = torch.arange(batch)
        for _ in range(steps):
            rows = torch.randperm(len(text_ND))[:batch]
            vendor = torch.randint(len(image_VND), (batch,))
            logits = net.image(image_VND[vendor, rows]) @ net.text(text_ND[rows]).T / TEMPERATURE
            loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            say()
    return net.eval()


@torch.inference_mode()
def measure(net: Projections, image_VND: Tensor, text_ND: Tensor) -> dict[str, float]:
    """Of N concepts: how often a picture's best name is its own, and the reverse; cosines of pairs and of strangers."""
    text, own = net.text(text_ND), torch.arange(len(text_ND))
    cosines = torch.stack([net.image(image) @ text.T for image in image_VND])
    pairs = cosines.diagonal(dim1=1, dim2=2)
    strangers = (cosines.sum() - pairs.sum()) / (cosines.numel() - pairs.numel())
    return {
        "concepts": len(own),
        "recall_picture_to_name": float((cosines.argmax(2) == own).float().mean()),
        "recall_name_to_picture": float((cosines.argmax(1) == own).float().mean()),
        "cosine_pairs": float(pairs.mean()),
        "cosine_strangers": float(strangers),
    }


def main(data: str, out: str, *, seed: int = 0, threads: int = 1, steps: int = STEPS) -> None:
    """Reads emoji, trains on four concepts in five, measures on the fifth, writes safetensors and JSON."""
    torch.set_num_threads(threads)
    captions, pictures = read_emoji(data)
    features, chunk = Features("cpu"), 32
    total, done = len(VENDORS) * -(-len(captions) // chunk) + len(captions) + steps, 0

    def say() -> None:
        nonlocal done
        if done % 20 == 0:
            print(f"progress {done}/{total}", flush=True)
        done += 1

    with torch.inference_mode():
        images = []
        for vendor in VENDORS:
            parts = []
            for start in range(0, len(captions), chunk):
                parts.append(features.image(torch.stack([pixels(p) for p in pictures[vendor][start : start + chunk]])))
                say()
            images.append(torch.cat(parts))
        texts = []
        for caption in captions:
            texts.append(features.text(caption))
            say()
    image_VND, text_ND = torch.stack(images).clone(), torch.stack(texts).clone()
    held = torch.arange(len(captions)) % 5 == 4
    net = train(image_VND[:, ~held], text_ND[~held], seed, steps, say)
    config = {
        "trained_on": f"{int((~held).sum())} emoji of {' and '.join(VENDORS)}",
        "held_out": measure(net, image_VND[:, held], text_ND[held]),
        "seed": seed,
        "steps": steps,
    }
    folder = trained.write(out, net, WEIGHTS_FILE, config, CONFIG_FILE)
    told = ", ".join(f"{k.replace('_', ' ')} {v:.3g}" for k, v in config["held_out"].items())  # type: ignore[attr-defined]
    print(f"mini_clip scorer in {folder}: on emoji it was not trained on: {told}")
