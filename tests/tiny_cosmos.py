"""Tiny random checkpoints in the published formats, a folder of generated videos, and the Cosmos recipe cut to them."""

import json
import shutil

import jax
import numpy as np
import tokenizers
from flax import nnx

from ddrl_jax.checkpoint import save_pretrained
from ddrl_jax.data.video import write_mp4
from ddrl_jax.models.cosmos_dit import CosmosDiT, CosmosDiTConfig

from .paths import ROOT

GOLDEN = ROOT / "tests" / "golden"
WORDS = [
    "a",
    "the",
    "ball",
    "box",
    "moves",
    "slides",
    "left",
    "right",
    "up",
    "down",
    "over",
    "red",
    "green",
    "blue",
    "grey",
    "floor",
]
SIZES = dict(width=48, depth=2, heads=4, adaln_rank=8, context_dim=16)
TEXT = dict(length=24, dim=192)  # four layers of width 48
FRAMES, SHORT, LONG = 9, 32, 48


def network(folder, *, depth=SIZES["depth"]):
    """An official `.pt` file of a random DiT, none of its parameters zero or one."""
    config = CosmosDiTConfig(**SIZES | {"depth": depth}, context_in=TEXT["dim"], dtype="float32")
    graphdef, params = nnx.split(CosmosDiT(config, rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.02 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    file = folder / "model.pt"
    save_pretrained(file, graphdef, jax.tree.unflatten(tree, noisy), layout="official")
    return file


def tower(folder):
    """The golden text tower with a tokenizer of a few words."""
    shutil.copytree(GOLDEN / "text_encoder" / "hf_hub_layout_prefix_model", folder)
    special = ["[unk]", "[pad]", "<|im_start|>", "<|im_end|>"]
    said = "system user You are helpful assistant who will provide prompts to an image generator."
    vocabulary = dict.fromkeys([*special, *said.split(), *WORDS])
    tokens = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[unk]")
    )
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokens.add_special_tokens(special[1:])
    tokens.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[pad]"}))
    return folder


def clip(seed, height=SHORT, width=LONG, frames=FRAMES):
    """A coloured box that moves over a shaded floor, uint8 (T, H, W, 3)."""
    rng = np.random.default_rng(seed)
    shade = np.linspace(40, 160, height)[:, None, None]
    video = np.broadcast_to(shade, (frames, height, width, 3)).copy()
    colour, dx = rng.integers(60, 255, 3), rng.integers(1, 3)
    for t, frame in enumerate(video):
        x = 4 + t * dx
        frame[8:20, x : x + 10] = colour
    return video.astype(np.uint8)


def videos(folder, count=8):
    """`count` usable videos, a quarter of them portrait, and three others: corrupt, too short, without a caption."""
    (folder / "videos").mkdir(parents=True)
    (folder / "metas").mkdir()

    def put(name, pixels, caption):
        write_mp4(folder / "videos" / f"{name}.mp4", pixels, 16)
        if caption:
            (folder / "metas" / f"{name}.txt").write_text(caption + "\n")

    for i in range(count):
        size = (LONG, SHORT) if i % 4 == 3 else (SHORT, LONG)
        put(f"clip{i}", clip(i, *size), f"a {WORDS[11 + i % 4]} box moves right over the floor {i}")
    put("short", clip(90, frames=5), "a box")
    put("silent", clip(91), "")
    (folder / "videos" / "corrupt.mp4").write_bytes(b"no video at all")
    (folder / "metas" / "corrupt.txt").write_text("a box")
    return folder


def flags(folder):
    """The recipe's fields that say how large and where: all that a tiny run overrides."""
    sizes = {f"model.{name}": value for name, value in SIZES.items()}
    sizes |= {f"text.{name}": value for name, value in TEXT.items()}
    sizes |= {"data.frames": FRAMES, "data.size": SHORT, "data.long_size": LONG}
    sizes |= {"rollout.conditions": 2, "rollout.group_size": 4, "rollout.num_steps": 4, "train.micro_batch": 8}
    sizes |= {"train.steps": 2, "train.warmup_steps": 1, "checkpoint.every": 1}
    sizes |= {"eval.clips": 4, "eval.clips_during": 2, "eval.heldout_clips": 3, "eval.chunk": 2, "eval.num_steps": 3}
    sizes |= {"mesh.replica": 1, "mesh.fsdp": 1, "mesh.context": 1}
    places = {
        "model.checkpoint": folder / "model.pt",
        "codec.path": folder / "tokenizer.pth",
        "text_encoder.path": folder / "tower",
        "data.path": folder / "data",
        "reward.env": "this",
    }
    found = [f"--config.{name}={value}" for name, value in (sizes | places).items()]
    return [*found, "--config.rollout.trained_steps=(0, 2)"]


def everything(folder):
    """Checkpoints and videos in `folder`."""
    network(folder)
    shutil.copy(GOLDEN / "wan_vae" / "official.pth", folder / "tokenizer.pth")
    tower(folder / "tower")
    videos(folder / "data")
    return folder
