"""The Wan2.1 autoencoder's tensors in files: the official names and diffusers' (`AutoencoderKLWan`).

Both hold torch's convolutions, output channels first. The official form says nothing of the latents' statistics; they
are the published model's.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ddrl_jax.checkpoint.entries import Entry
from ddrl_jax.models.wan_vae import LATENTS_MEAN, LATENTS_STD, WanVAE, WanVAEConfig

MODEL = WanVAE
TITLE = "Wan2.1 VAE"
STEM = "diffusion_pytorch_model"
# What `save_pretrained` writes -> our name of the form.
LAYOUTS = {"official": "official", "diffusers": "diffusers"}

_CLASS = "AutoencoderKLWan"
# A name that starts so is the form's. `AutoencoderKL` shares diffusers' names but for the gains, "gamma".
_OFFICIAL = ("encoder.downsamples.0.residual.", "decoder.upsamples.0.residual.", "decoder.middle.0.residual.")
_DIFFUSERS = ("encoder.down_blocks.0.norm1.gamma", "decoder.mid_block.resnets.0.norm1.gamma")

_CONV3, _CONV2, _PRODUCT = (2, 3, 4, 1, 0), (2, 3, 1, 0), (1, 0)


def recognise(names: Collection[str], config: dict[str, Any] | None) -> bool:
    """Whether tensors of these names, or a folder with this config.json, are a Wan autoencoder."""
    if config is not None and config.get("_class_name") == _CLASS:
        return True
    return any(name.startswith(_OFFICIAL + _DIFFUSERS) for name in names)


def read_config(
    path: Path, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any] | None, which: str
) -> tuple[WanVAEConfig, str]:
    """Sizes and layout: from config.json for diffusers' form, from the shapes for the official one.

    Raises:
      ValueError: `which` is not "raw", or there is no such autoencoder.
    """
    if which != "raw":
        raise ValueError(f'which={which!r}: {path} is a Wan autoencoder, which has one set of weights; use "raw"')
    if any(name.startswith(_OFFICIAL) for name in shapes):
        return _from_shapes(path, shapes), "official"
    if config is None or config.get("_class_name") != _CLASS:
        found = "no config.json" if config is None else f"a config.json of _class_name {config.get('_class_name')!r}"
        raise ValueError(f"{path} has diffusers' names of a Wan autoencoder, and {found}; {_CLASS}'s is needed")
    return _from_json(path, config), "diffusers"


def _from_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> WanVAEConfig:
    """Sizes of an official file: of each number what most tensors say, so that one bad shape is found out later."""
    layers: dict[int, set[str]] = collections.defaultdict(set)
    for name in shapes:
        if match := re.match(r"encoder\.downsamples\.(\d+)\.(residual|shortcut|resample|time_conv)\.", name):
            layers[int(match[1])].add(match[2])
    halvings = sorted(number for number, parts in layers.items() if parts & {"resample", "time_conv"})
    blocks = halvings[0] if halvings else max(layers, default=-1) + 1

    def width(names: str, otherwise: int, axis: int = 0) -> int:
        """The most frequent length of the tensors whose names match."""
        found = [shape for name, shape in shapes.items() if re.fullmatch(names, name)]
        votes = collections.Counter(shape[axis] for shape in found if len(shape) > axis)
        return votes.most_common(1)[0][0] if votes else otherwise

    dim = width(r"encoder\.conv1\.(weight|bias)|encoder\.downsamples\.0\.residual\.0\.gamma", WanVAEConfig.dim)
    z_dim = width(r"(conv2|decoder\.conv1)\.weight", WanVAEConfig.z_dim, axis=1)
    widths: list[int] = []
    for level in range(len(halvings) + 1):
        numbers = "|".join(str(level * (blocks + 1) + n) for n in range(blocks))
        names = rf"encoder\.downsamples\.({numbers})\.residual\.(2\.bias|3\.gamma|6\.bias|6\.weight)"
        widths.append(width(names, widths[-1] if widths else dim))
    if any(w % dim for w in widths):
        raise ValueError(f"{path} is no Wan autoencoder: its levels' widths {widths} are not multiples of {dim}")
    if z_dim != len(LATENTS_MEAN):
        raise ValueError(
            f"{path} has {z_dim} latent channels; the official form does not hold their statistics, which are known "
            f"for {len(LATENTS_MEAN)}: a diffusers folder is needed"
        )
    try:
        return WanVAEConfig(
            dim=dim,
            z_dim=z_dim,
            dim_mult=tuple(w // dim for w in widths),
            num_res_blocks=blocks,
            temporal_downsample=tuple("time_conv" in layers[number] for number in halvings),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# Of diffusers' config: what has one value in every Wan2.1 autoencoder, and what later versions added.
_FIXED: dict[str, Any] = {
    "attn_scales": [],
    "is_residual": False,
    "in_channels": 3,
    "out_channels": 3,
    "patch_size": None,
}
_SIZES = ("base_dim", "z_dim", "dim_mult", "num_res_blocks", "temperal_downsample", "latents_mean", "latents_std")


def config_json(config: WanVAEConfig) -> dict[str, Any]:
    """The config.json of a diffusers folder."""
    return {
        "_class_name": _CLASS,
        "_diffusers_version": "0.42.1",
        "base_dim": config.dim,
        "decoder_base_dim": None,
        "dim_mult": list(config.dim_mult),
        "dropout": 0.0,
        "latents_mean": list(config.latents_mean),
        "latents_std": list(config.latents_std),
        "num_res_blocks": config.num_res_blocks,
        "scale_factor_spatial": config.spatial,
        "scale_factor_temporal": config.temporal,
        "temperal_downsample": list(config.temporal_downsample),
        "z_dim": config.z_dim,
        **_FIXED,
    }


def _from_json(path: Path, given: dict[str, Any]) -> WanVAEConfig:
    if absent := [name for name in _SIZES if name not in given]:
        raise ValueError(f"{path}: config.json has no {', '.join(absent)}")
    fixed = {**_FIXED, "decoder_base_dim": given["base_dim"]}
    for name, value in fixed.items():
        # Older files lack some of them; null is "as the encoder" for decoder_base_dim, and [] for a list.
        if (found := given.get(name)) is not None and found != value:
            raise ValueError(f"{path}: config.json has {name} {found!r}; a Wan2.1 autoencoder has {value!r}")
    try:
        return WanVAEConfig(
            dim=given["base_dim"],
            z_dim=given["z_dim"],
            dim_mult=tuple(given["dim_mult"]),
            num_res_blocks=given["num_res_blocks"],
            temporal_downsample=tuple(given["temperal_downsample"]),
            latents_mean=tuple(given["latents_mean"]),
            latents_std=tuple(given["latents_std"]),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: config.json: {error}") from error


def ignored(name: str, layout: str, which: str) -> bool:
    """No tensor of a Wan autoencoder's file is anything but a parameter."""
    del name, layout, which
    return False


def entries(config: WanVAEConfig, layout: str, which: str = "raw") -> list[Entry]:
    """One entry a parameter.

    Raises:
      ValueError: the official layout is asked for and the latents' statistics are not the published model's, which
        that layout means.
    """
    del which
    official = layout == "official"
    if official and (config.latents_mean, config.latents_std) != (LATENTS_MEAN, LATENTS_STD):
        raise ValueError(
            "latents_mean, latents_std: not the published model's, and the official layout cannot say so; use "
            'layout="diffusers"'
        )
    table: list[Entry] = []

    def weights(ours: str, theirs: str, axes: tuple[int, ...], ones: int = 0) -> None:
        table.append(Entry(f"{ours}.kernel", f"{theirs}.weight", axes, ones))
        table.append(Entry(f"{ours}.bias", f"{theirs}.bias"))

    def gain(ours: str, theirs: str, ones: int = 3) -> None:
        table.append(Entry(f"{ours}.scale", f"{theirs}.gamma", None, ones))

    def block(ours: str, theirs: str, d_in: int, d_out: int) -> None:
        names = (
            ("residual.0", "residual.2", "residual.3", "residual.6", "shortcut")
            if official
            else ("norm1", "conv1", "norm2", "conv2", "conv_shortcut")
        )
        gain(f"{ours}.norm1", f"{theirs}.{names[0]}")
        weights(f"{ours}.conv1", f"{theirs}.{names[1]}", _CONV3)
        gain(f"{ours}.norm2", f"{theirs}.{names[2]}")
        weights(f"{ours}.conv2", f"{theirs}.{names[3]}", _CONV3)
        if d_in != d_out:
            weights(f"{ours}.shortcut", f"{theirs}.{names[4]}", _PRODUCT, 3)

    def resample(ours: str, theirs: str, temporal: bool) -> None:
        weights(f"{ours}.space", f"{theirs}.resample.1", _CONV2)
        if temporal:
            weights(f"{ours}.time", f"{theirs}.time_conv", _CONV3)

    def ends(part: str, width: int) -> None:
        names = ("conv1", "head.0", "head.2") if official else ("conv_in", "norm_out", "conv_out")
        weights(f"{part}.conv_in", f"{part}.{names[0]}", _CONV3)
        gain(f"{part}.norm_out", f"{part}.{names[1]}")
        weights(f"{part}.conv_out", f"{part}.{names[2]}", _CONV3)
        for n, theirs in (
            ((0, "middle.0"), (2, "middle.2")) if official else ((0, "mid_block.resnets.0"), (2, "mid_block.resnets.1"))
        ):
            block(f"{part}.middle.{n}", f"{part}.{theirs}", width, width)
        theirs = f"{part}.middle.1" if official else f"{part}.mid_block.attentions.0"
        gain(f"{part}.middle.1.norm", f"{theirs}.norm", 2)
        weights(f"{part}.middle.1.qkv", f"{theirs}.to_qkv", _PRODUCT, 2)
        weights(f"{part}.middle.1.proj", f"{theirs}.proj", _PRODUCT, 2)

    ends("encoder", config.widths[-1])
    n, d_in = 0, config.dim
    for level, width in enumerate(config.widths):
        for _ in range(config.num_res_blocks):
            block(f"encoder.down.{n}", f"encoder.{'downsamples' if official else 'down_blocks'}.{n}", d_in, width)
            n, d_in = n + 1, width
        if level < len(config.temporal_downsample):
            theirs = f"encoder.{'downsamples' if official else 'down_blocks'}.{n}"
            resample(f"encoder.down.{n}", theirs, config.temporal_downsample[level])
            n += 1

    ends("decoder", config.widths[-1])
    n, d_in = 0, config.widths[-1]
    for level, width in enumerate(config.widths[::-1]):
        for i in range(config.num_res_blocks + 1):
            theirs = f"decoder.upsamples.{n}" if official else f"decoder.up_blocks.{level}.resnets.{i}"
            block(f"decoder.up.{n}", theirs, d_in, width)
            n, d_in = n + 1, width
        if level < len(config.temporal_downsample):
            theirs = f"decoder.upsamples.{n}" if official else f"decoder.up_blocks.{level}.upsamplers.0"
            resample(f"decoder.up.{n}", theirs, config.temporal_downsample[::-1][level])
            n, d_in = n + 1, width // 2

    weights("to_moments", "conv1" if official else "quant_conv", _PRODUCT, 3)
    weights("from_latent", "conv2" if official else "post_quant_conv", _PRODUCT, 3)
    return table
