"""The Cosmos DiT's names and sizes in the official and the diffusers form (`specs/cosmos.md` section 7).

Both hold torch's (out, in) matrices, every block's by themselves; ours are (in, out) kernels with the blocks stacked
along a leading axis. An official file may hold two sets, the raw weights (`net.`) and their EMA (`net_ema.`).
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ddrl_jax.checkpoint.entries import Entry
from ddrl_jax.models.cosmos_dit import CosmosDiT, CosmosDiTConfig

MODEL = CosmosDiT
TITLE = "Cosmos DiT"
STEM = "diffusion_pytorch_model"
LAYOUTS = {"official": "official", "diffusers": "diffusers"}

_CLASS = "CosmosTransformer3DModel"
_PREFIX = {"raw": "net.", "ema": "net_ema."}
# Entries of an official state dict that are no parameters: training counters, position tables, quantiser state.
_NO_PARAMETER = re.compile(r"^accum_|^pos_embedder\.|_extra_state$")


@dataclasses.dataclass(frozen=True)
class _Weight:
    """One parameter in all three namings; "{}" is the block's number, `dims` the torch shape in `_letters`' letters."""

    ours: str
    official: str
    diffusers: str
    dims: str


def _weights() -> list[_Weight]:
    table = [
        _Weight("patch_embed.kernel", "x_embedder.proj.1.weight", "patch_embed.proj.weight", "D I"),
        _Weight("context_proj.kernel", "crossattn_proj.0.weight", "crossattn_proj.0.weight", "E S"),
        _Weight("context_proj.bias", "crossattn_proj.0.bias", "crossattn_proj.0.bias", "E"),
        _Weight("time_in.kernel", "t_embedder.1.linear_1.weight", "time_embed.t_embedder.linear_1.weight", "D D"),
        _Weight("time_out.kernel", "t_embedder.1.linear_2.weight", "time_embed.t_embedder.linear_2.weight", "3D D"),
        _Weight("time_norm.scale", "t_embedding_norm.weight", "time_embed.norm.weight", "D"),
        _Weight("final_mod.down.kernel", "final_layer.adaln_modulation.1.weight", "norm_out.linear_1.weight", "R D"),
        _Weight("final_mod.up.kernel", "final_layer.adaln_modulation.2.weight", "norm_out.linear_2.weight", "2D R"),
        _Weight("final.kernel", "final_layer.linear.weight", "proj_out.weight", "O D"),
    ]
    block = [
        ("mlp.up.kernel", "mlp.layer1", "ff.net.0.proj", "M D"),
        ("mlp.down.kernel", "mlp.layer2", "ff.net.2", "D M"),
    ]
    for ours, official, diffusers, context in (("self", "self_attn", "1", "D"), ("cross", "cross_attn", "2", "E")):
        for p, d_in in (("q", "D"), ("k", context), ("v", context)):
            block.append((f"{ours}_attn.{p}.kernel", f"{official}.{p}_proj", f"attn{diffusers}.to_{p}", f"D {d_in}"))
        for p in "qk":
            block.append((f"{ours}_attn.{p}_norm.scale", f"{official}.{p}_norm", f"attn{diffusers}.norm_{p}", "K"))
        block.append((f"{ours}_attn.out.kernel", f"{official}.output_proj", f"attn{diffusers}.to_out.0", "D D"))
    for ours, official, number in (("self", "self_attn", 1), ("cross", "cross_attn", 2), ("mlp", "mlp", 3)):
        for i, p, dims in ((1, "down", "R D"), (2, "up", "3D R")):
            block.append(
                (f"{ours}_mod.{p}.kernel", f"adaln_modulation_{official}.{i}", f"norm{number}.linear_{i}", dims)
            )
    for mine, official, diffusers, dims in block:
        table.append(
            _Weight(
                f"blocks.{mine}",
                f"blocks.{{}}.{official}.weight",
                f"transformer_blocks.{{}}.{diffusers}.weight",
                dims,
            )
        )
    return table


_WEIGHTS = _weights()


# ---- what the loader asks --------------------------------------------------------------------------------------------


def recognise(names: Collection[str], config: Mapping[str, Any] | None) -> bool:
    """Whether tensor names or a config.json are a Cosmos DiT's."""
    if config is not None and config.get("_class_name") == _CLASS:
        return True
    return any(name.startswith(("net.", "net_ema.", "transformer_blocks.", "time_embed.t_embedder.")) for name in names)


def read_config(
    path: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None, which: str
) -> tuple[CosmosDiTConfig, Literal["official", "diffusers"]]:
    """Sizes and layout: of the diffusers form from its config.json, of the official one from the tensors' shapes.

    Raises ValueError: not such a network, no set of weights `which`, or a diffusers file without its config.json.
    """
    official = any(name.startswith(tuple(_PREFIX.values())) for name in shapes)
    if official and not (path.is_dir() and config is not None and "_class_name" in config):
        found = [key for key, prefix in _PREFIX.items() if any(name.startswith(prefix) for name in shapes)]
        if which not in found:
            raise ValueError(f'which="{which}": {path} has no names {_PREFIX[which]}*; it has which="{found[0]}"')
        return _from_letters(*_infer(shapes, which)), "official"
    if config is None:
        raise ValueError(
            f"{path} is of the diffusers form, without a config.json beside it: give the folder with config.json and "
            "all weights"
        )
    if which == "ema":
        raise ValueError(f'which="ema": {path} is of a diffusers folder, which holds one set of weights; use "raw"')
    return _from_json((path if path.is_dir() else path.parent) / "config.json", config), "diffusers"


def entries(config: CosmosDiTConfig, layout: str, which: str = "raw") -> list[Entry]:
    """Every parameter's names in a layout.

    Raises ValueError for the official layout of a network that is not of the official patch, grid and RoPE: that form
    does not hold them.
    """
    if layout == "official":
        for field in ("patch", "max_grid", "rope_ratios"):
            if getattr(config, field) != getattr(CosmosDiTConfig, field):
                raise ValueError(
                    f"{field} is {getattr(config, field)}; the official layout cannot say so, it means "
                    f'{getattr(CosmosDiTConfig, field)}: use layout="diffusers"'
                )
    table = []
    for weight in _WEIGHTS:
        name = _PREFIX[which] + weight.official if layout == "official" else weight.diffusers
        rows = config.depth if weight.ours.startswith("blocks.") else 0
        table.append(Entry(weight.ours, name, axes=(1, 0) if " " in weight.dims else None, rows=rows))
    return table


def ignored(name: str, layout: str, which: str) -> bool:
    """What an official file may hold beside the parameters: the other set, and what is no parameter."""
    if layout != "official":
        return False
    other = _PREFIX["ema" if which == "raw" else "raw"]
    return name.startswith(other) or bool(_NO_PARAMETER.search(name.removeprefix(_PREFIX[which])))


def config_json(config: CosmosDiTConfig) -> dict[str, Any]:
    """The config.json of a diffusers folder."""
    return {
        "_class_name": _CLASS,
        "_diffusers_version": "0.42.1",
        "adaln_lora_dim": config.adaln_rank,
        "attention_head_dim": config.head_width,
        "concat_padding_mask": True,
        "controlnet_block_every_n": None,
        "crossattn_proj_in_channels": config.context_in,
        "encoder_hidden_states_channels": config.context_dim,
        "extra_pos_embed_type": None,
        "img_context_dim_in": None,
        "in_channels": config.in_channels + 1,
        "max_size": [n * p for n, p in zip(config.max_grid, config.patch, strict=True)],
        "mlp_ratio": config.mlp_ratio,
        "num_attention_heads": config.heads,
        "num_layers": config.depth,
        "out_channels": config.in_channels,
        "patch_size": list(config.patch),
        "rope_scale": list(config.rope_ratios),
        "text_embed_dim": config.context_dim,
        "use_crossattn_projection": True,
    }


# ---- sizes -----------------------------------------------------------------------------------------------------------
#
# The letters of `_Weight.dims`: D width, K head width, M hidden width of the MLP, R rank of the modulation, S width of
# the text features, E the width they are projected to, I and O what a patch holds going in (with two masks) and out.


def _letters(config: CosmosDiTConfig) -> dict[str, int]:
    cells = int(np.prod(config.patch))
    return {
        "D": config.width,
        "K": config.head_width,
        "M": config.mlp_width,
        "R": config.adaln_rank,
        "S": config.context_in,
        "E": config.context_dim,
        "I": (config.in_channels + 2) * cells,
        "O": config.in_channels * cells,
    }


def _infer(shapes: Mapping[str, tuple[int, ...]], which: str) -> tuple[int, dict[str, int]]:
    """Depth and sizes from the shapes: for every letter what most tensors say, so that one bad shape is found out.

    A letter that no tensor says has the published 2B network's size: what holds it is missing or of the wrong rank, and
    reported as that.
    """
    prefix = _PREFIX[which]
    block = re.compile(re.escape(prefix) + r"blocks\.(\d+)\.")
    depth = max((int(match[1]) for name in shapes if (match := block.match(name))), default=0) + 1
    votes: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for weight in _WEIGHTS:
        dims = weight.dims.split()
        for row in range(depth if "{}" in weight.official else 1):
            shape = shapes.get(prefix + weight.official.format(row), ())
            if len(shape) == len(dims):
                for size, dim in zip(shape, dims, strict=True):
                    votes[dim[-1]][size // int(dim[:-1] or 1)] += 1
    letters = {letter: counter.most_common(1)[0][0] for letter, counter in votes.items()}
    masks = 2 * int(np.prod(CosmosDiTConfig.patch))
    if "I" in letters:
        letters["O"] = letters["I"] - masks
    elif "O" in letters:
        letters["I"] = letters["O"] + masks
    return depth, _letters(CosmosDiTConfig()) | letters


def _from_letters(depth: int, letters: Mapping[str, int]) -> CosmosDiTConfig:
    """An official checkpoint's sizes; what its shapes do not show is the same for all of them (patch, grid, RoPE)."""
    patch = CosmosDiTConfig.patch
    cells = int(np.prod(patch))
    if letters["O"] % cells or letters["O"] < 1 or letters["D"] % letters["K"]:
        raise ValueError(
            f"not a Cosmos DiT: a patch takes {letters['I']} and gives {letters['O']} numbers (must be {cells}(C+2) "
            f"and {cells}C), heads of {letters['K']} in a width of {letters['D']}"
        )
    return CosmosDiTConfig(
        in_channels=letters["O"] // cells,
        width=letters["D"],
        depth=depth,
        heads=letters["D"] // letters["K"],
        mlp_ratio=letters["M"] / letters["D"],
        adaln_rank=letters["R"],
        context_in=letters["S"],
        context_dim=letters["E"],
    )


def _from_json(file: Path, given: Mapping[str, Any]) -> CosmosDiTConfig:
    kind = given.get("_class_name")
    if kind != _CLASS:
        raise ValueError(f"{file}: _class_name is {kind!r}, not {_CLASS}, which the tensors' names belong to")
    ours = config_json(CosmosDiTConfig())
    later = ("controlnet_block_every_n", "img_context_dim_in")  # not in the files of older versions
    if absent := sorted(set(ours) - set(later) - set(given) - {"_diffusers_version"}):
        raise ValueError(f"{file} has no {', '.join(absent)}")
    for field in ("concat_padding_mask", "use_crossattn_projection", "extra_pos_embed_type", *later):
        if (given.get(field) or None) != ours[field]:
            raise ValueError(f"{file}: {field} is {given[field]!r}; a Cosmos-Predict2.5 DiT has {ours[field]!r}")
    if given["in_channels"] != given["out_channels"] + 1:
        raise ValueError(
            f"{file}: in_channels is {given['in_channels']}; out_channels and one for the condition mask make "
            f"{given['out_channels'] + 1}"
        )
    try:
        patch = tuple(given["patch_size"])
        return CosmosDiTConfig(
            in_channels=given["out_channels"],
            width=given["num_attention_heads"] * given["attention_head_dim"],
            depth=given["num_layers"],
            heads=given["num_attention_heads"],
            mlp_ratio=given["mlp_ratio"],
            adaln_rank=given["adaln_lora_dim"],
            context_in=given["crossattn_proj_in_channels"],
            context_dim=given["encoder_hidden_states_channels"],
            patch=patch,
            max_grid=tuple(n // p for n, p in zip(given["max_size"], patch, strict=True)),
            rope_ratios=tuple(given["rope_scale"]),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
