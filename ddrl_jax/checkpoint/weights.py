"""Weights in and out: the official and the diffusers form of the Cosmos DiT <-> (graphdef, params).

Both forms hold torch's (out, in) matrices, every block's by themselves; ours are (in, out) kernels with the blocks
stacked along a leading axis. Nothing is skipped in silence: one error lists every missing, unexpected and misshapen
name. Names and shapes: `specs/cosmos.md` section 7.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ddrl_jax.models.cosmos_dit import CosmosDiT, CosmosDiTConfig
from ddrl_jax.parallel.mesh import fsdp_sharding

Layout = Literal["official", "diffusers"]
Tensors = Mapping[str, np.ndarray]

_DIFFUSERS_CLASS = "CosmosTransformer3DModel"
_DIFFUSERS_STEM = "diffusion_pytorch_model"
_FAMILIES = "only Cosmos-Predict2.5 DiTs (official or diffusers form) can be loaded today"
_PREFIX = {"raw": "net.", "ema": "net_ema."}
# Entries of an official state dict that are no parameters: training counters, position tables, quantiser state.
_NO_PARAMETER = re.compile(r"^accum_|^pos_embedder\.|_extra_state$")


class Form(NamedTuple):
    """How a file names its tensors."""

    layout: Layout
    prefix: str = ""


@dataclasses.dataclass(frozen=True)
class _Weight:
    """One parameter in all three namings; "{}" is the block's number, `dims` the torch shape in `_letters`' letters."""

    ours: str
    official: str
    diffusers: str
    dims: str

    @property
    def stacked(self) -> bool:
        return self.ours.startswith("blocks.")

    def names(self, form: Form, depth: int) -> list[str]:
        """The file's names of this parameter, one a block."""
        name = form.prefix + (self.official if form.layout == "official" else self.diffusers)
        return [name.format(block) for block in range(depth if self.stacked else 1)]


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


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    which: Literal["raw", "ema"] = "raw",
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Reads a Cosmos DiT.

    Args:
      path: an official `.safetensors` or `.pt` file, a folder with one `.safetensors` or with shards and their index,
        or a diffusers folder, which is one that has a config.json with a _class_name, or its one `.safetensors` file.
        Sizes come from config.json, or from the tensors' shapes (head width = length of q_norm).
      which: of an official file, "raw" the `net.*` weights or "ema" the `net_ema.*` ones; the others are left alone.
      mesh: shard every parameter over its fsdp axis; None: on the default device. Each device reads its own part only.
      dtype: of the parameters; None is float32, which holds float32 and bfloat16 files exactly.
      compute_dtype: what the network computes in; None is the parameters' dtype.

    Returns:
      (graphdef, params): `nnx.merge(graphdef, params)` is a `CosmosDiT`.

    Raises:
      ValueError: nothing readable there, not a Cosmos DiT, names or shapes that do not fit (all of them listed), a mesh
        without an fsdp axis, or float64 without jax_enable_x64.
    """
    path = Path(path)
    if which not in _PREFIX:
        raise ValueError(f'which={which!r}: must be "raw" or "ema"')
    if mesh is not None and "fsdp" not in mesh.axis_names:
        raise ValueError(f"mesh has the axes {mesh.axis_names}: one of them must be fsdp")
    param_dtype = np.dtype("float32" if dtype is None else dtype)
    compute = np.dtype(param_dtype if compute_dtype is None else compute_dtype)
    for name, value in (("dtype", param_dtype), ("compute_dtype", compute)):
        if jax.dtypes.canonicalize_dtype(value) != value:
            raise ValueError(f"{name}={value.name}: needs jax_enable_x64")
    tensors = _read(path)
    config_file = _diffusers_config_file(path, tensors)
    if config_file is not None:
        if which == "ema":
            raise ValueError(f'which="ema": {path} is a diffusers folder, which holds one set of weights; use "raw"')
        form = Form("diffusers")
        config = _from_diffusers_json(config_file)
        _check(path, form, tensors, config.depth, _letters(config))
    else:
        form = Form("official", _PREFIX[which])
        tensors = _of_one_set(path, tensors, which)
        depth, letters = _infer(tensors, form)
        _check(path, form, tensors, depth, letters)
        config = _from_letters(depth, letters)

    config = dataclasses.replace(config, param_dtype=param_dtype.name, dtype=compute.name)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: CosmosDiT(config, rngs=nnx.Rngs(0))))
    if mesh is None:
        default = jnp.zeros(()).sharding
        shardings = jax.tree.map(lambda _: default, abstract)
    else:
        shardings = fsdp_sharding(mesh, abstract)
    placed = dict(nnx.to_flat_state(shardings))
    weights = {weight.ours: weight for weight in _WEIGHTS}
    flat = []
    for key, leaf in nnx.to_flat_state(abstract):
        weight = weights[".".join(map(str, key))]
        mapped = [tensors[name].T for name in weight.names(form, config.depth)]
        read = functools.partial(_part, mapped, weight.stacked, param_dtype)
        array = jax.make_array_from_callback(leaf.shape, placed[key].get_value(), read, dtype=param_dtype)
        flat.append((key, leaf.replace(array)))
    return graphdef, nnx.from_flat_state(flat)


def _part(mapped: list[np.ndarray], stacked: bool, dtype: np.dtype, index: Any) -> np.ndarray:
    """What one device holds of a parameter: `index` cuts the stacked array, and only the cut is read from disk."""
    if not stacked:
        return mapped[0][index].astype(dtype)
    return np.stack([block[index[1:]].astype(dtype) for block in mapped[index[0]]])


def save_pretrained(
    path: str | os.PathLike[str],
    graphdef: nnx.GraphDef,
    params: Any,
    *,
    layout: Layout = "official",
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 10 * 10**9,
) -> None:
    """Writes a Cosmos DiT so that `load_pretrained` gives back the same bits.

    Args:
      path: "official": the `.safetensors` file to write, or a folder to get a `model.safetensors`; names `net.*`.
        "diffusers": the folder. Folders are made if missing; their names end in no file's suffix, such as `.pt`.
      graphdef: of a `CosmosDiT`.
      params: its parameters.
      layout: "official" or "diffusers".
      dtype: of the tensors written; None: as the parameters are.
      max_shard_bytes: a diffusers folder with more is split into files of at most this size (one tensor at least), with
        an index.

    Raises:
      ValueError: an unknown layout, a model that is not a Cosmos DiT or, for "official", not of the official patch,
        grid and RoPE (which that form does not hold), or a file where a folder is to be.
    """
    path = Path(path)
    model = nnx.merge(graphdef, params)
    if not isinstance(model, CosmosDiT):
        raise ValueError(f"graphdef is of a {type(model).__name__}; only a CosmosDiT can be saved")
    if layout not in ("official", "diffusers"):
        raise ValueError(f'layout={layout!r}: must be "official" or "diffusers"')
    # "Cosmos-Predict2.5-2B" is a folder's name, "model.pt" is not.
    fits = layout == "official" and path.suffix == ".safetensors"
    if re.fullmatch(r"\.[A-Za-z]+", path.suffix) and not path.is_dir() and not fits:
        wanted = "a folder" if layout == "diffusers" else "a .safetensors file or a folder"
        raise ValueError(f"path={path}: must be {wanted} for layout={layout!r}, not a {path.suffix} file")
    standard = CosmosDiTConfig
    for field in ("patch", "max_grid", "rope_ratios") if layout == "official" else ():
        if getattr(model.config, field) != getattr(standard, field):
            raise ValueError(
                f"{field} is {getattr(model.config, field)}; the official layout cannot say so, it means "
                f'{getattr(standard, field)}: use layout="diffusers"'
            )
    file = path if layout == "official" and path.suffix == ".safetensors" else path / "model.safetensors"
    if file.parent.exists() and not file.parent.is_dir():
        raise ValueError(f"path={path}: {file.parent} must be a folder; it is a file")

    leaves = {".".join(map(str, key)): leaf[...] for key, leaf in nnx.to_flat_state(nnx.state(model))}
    form = Form(layout, _PREFIX["raw"] if layout == "official" else "")
    tensors = {}
    for weight in _WEIGHTS:
        value = np.asarray(leaves[weight.ours])
        value = value if dtype is None else value.astype(dtype)
        for block, name in enumerate(weight.names(form, model.config.depth)):
            tensors[name] = (value[block] if weight.stacked else value).T

    file.parent.mkdir(parents=True, exist_ok=True)
    if layout == "official":
        _write_safetensors(file, tensors)
        return
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, value in sorted(tensors.items()):
        if shards[-1] and sum(v.nbytes for v in shards[-1].values()) + value.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = value
    for stale in path.glob(f"{_DIFFUSERS_STEM}*.safetensors*"):
        stale.unlink()
    if len(shards) == 1:
        _write_safetensors(path / f"{_DIFFUSERS_STEM}.safetensors", shards[0])
    else:
        index: dict[str, Any] = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": {}}
        for i, shard in enumerate(shards, start=1):
            shard_name = f"{_DIFFUSERS_STEM}-{i:05d}-of-{len(shards):05d}.safetensors"
            _write_safetensors(path / shard_name, shard)
            index["weight_map"] |= dict.fromkeys(shard, shard_name)
        _write(path / f"{_DIFFUSERS_STEM}.safetensors.index.json", json.dumps(index, indent=2).encode())
    _write(path / "config.json", json.dumps(_diffusers_json(model.config), indent=2).encode())


# ---- names and sizes -------------------------------------------------------------------------------------------------
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


def _from_letters(depth: int, letters: Mapping[str, int]) -> CosmosDiTConfig:
    """An official checkpoint's sizes; what its shapes do not show is the same for all of them (patch, grid, RoPE)."""
    patch = CosmosDiTConfig.patch
    cells = int(np.prod(patch))
    if letters["O"] % cells or letters["I"] - letters["O"] != 2 * cells or letters["D"] % letters["K"]:
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


def _infer(tensors: Tensors, form: Form) -> tuple[int, dict[str, int]]:
    """Depth and sizes from the shapes: for every letter what most tensors say, so that one bad shape is found out."""
    block = re.compile(re.escape(form.prefix) + r"blocks\.(\d+)\.")
    depth = max((int(match[1]) for name in tensors if (match := block.match(name))), default=0) + 1
    votes: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for weight in _WEIGHTS:
        for name in weight.names(form, depth):
            shape, dims = tensors[name].shape if name in tensors else (), weight.dims.split()
            if len(shape) == len(dims):
                for size, dim in zip(shape, dims, strict=True):
                    votes[dim[-1]][size // int(dim[:-1] or 1)] += 1
    letters = {letter: counter.most_common(1)[0][0] for letter, counter in votes.items()}
    masks = 2 * int(np.prod(CosmosDiTConfig.patch))
    if "I" in letters:
        letters["O"] = letters["I"] - masks
    elif "O" in letters:
        letters["I"] = letters["O"] + masks
    return depth, letters


def _check(path: Path, form: Form, tensors: Tensors, depth: int, letters: Mapping[str, int]) -> None:
    """Raises one ValueError with every name that is missing, unexpected or misshapen."""
    known, missing, misshapen = set(), [], []
    for weight in _WEIGHTS:
        # A letter without a size: every tensor that has it is missing or of the wrong rank.
        want = tuple(int(dim[:-1] or 1) * letters.get(dim[-1], -1) for dim in weight.dims.split())
        for name in weight.names(form, depth):
            known.add(name)
            if name not in tensors:
                missing.append(name)
            elif tensors[name].shape != want:
                misshapen.append(f"{name} is {tensors[name].shape}, not {want}")
    parts = (
        ("missing", missing),
        ("unexpected", sorted(set(tensors) - known)),
        ("misshapen", misshapen),
    )
    if any(names for _, names in parts):
        raise ValueError(
            f"{path} does not fit a Cosmos DiT in the {form.layout} form: "
            + "; ".join(f"{len(names)} {word}: {', '.join(names)}" for word, names in parts if names)
        )


def _of_one_set(path: Path, tensors: Tensors, which: str) -> dict[str, np.ndarray]:
    """An official file's tensors without the other set and what is no parameter; foreign names stay, to be reported."""
    found = [key for key, prefix in _PREFIX.items() if any(name.startswith(prefix) for name in tensors)]
    if which not in found:
        hint = f'it has which="{found[0]}"' if found else f"it is no official Cosmos checkpoint; {_FAMILIES}"
        raise ValueError(f'which="{which}": {path} has no names {_PREFIX[which]}*; {hint}')
    other = _PREFIX["ema" if which == "raw" else "raw"]
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(other) and not _NO_PARAMETER.search(name.removeprefix(_PREFIX[which]))
    }


# ---- the diffusers config --------------------------------------------------------------------------------------------


def _diffusers_json(config: CosmosDiTConfig) -> dict[str, Any]:
    return {
        "_class_name": _DIFFUSERS_CLASS,
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


def _diffusers_config_file(path: Path, tensors: Tensors) -> Path | None:
    """The config.json of a diffusers folder, or beside a diffusers file; None for the official form."""
    official = any(name.startswith(tuple(_PREFIX.values())) for name in tensors)
    file = (path if path.is_dir() else path.parent) / "config.json"
    if path.is_dir():
        return file if file.is_file() and not (official and "_class_name" not in _json_object(file)) else None
    if official or path.suffix != ".safetensors":
        return None
    diffusers = any(name.startswith(("transformer_blocks.", "time_embed.t_embedder.")) for name in tensors)
    shard = re.search(r"-\d+-of-(?!0*1\.)\d+\.safetensors$", path.name)
    if diffusers and (shard or not file.is_file()):
        what = "one shard of several" if shard else "without a config.json beside it"
        raise ValueError(f"{path} is of the diffusers form, {what}: give the folder with config.json and all weights")
    return file if file.is_file() else None


def _json_object(file: Path) -> dict[str, Any]:
    try:
        given = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{file} is not a JSON object: it is a {type(given).__name__}")
    return given


def _from_diffusers_json(file: Path) -> CosmosDiTConfig:
    given = _json_object(file)
    kind = given.get("_class_name")
    if kind != _DIFFUSERS_CLASS:
        raise ValueError(f"{file}: _class_name is {kind!r}, not {_DIFFUSERS_CLASS}; {_FAMILIES}")
    ours = _diffusers_json(CosmosDiTConfig())
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


# ---- safetensors -----------------------------------------------------------------------------------------------------
#
# Read and written here, not with the package: it has no numpy bfloat16, and a 14B file must be mapped, not loaded.

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _read(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file, of a folder with one, or of a folder with shards and their index; mapped, not loaded."""
    if path.is_file() and path.suffix in (".pt", ".pth"):
        return _map_torch(path)
    if path.is_file():
        return _map_safetensors(path)
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; a .safetensors file or a folder with one is needed")
    indices, files = sorted(path.glob("*.safetensors.index.json")), sorted(path.glob("*.safetensors"))
    if len(indices) == 1:
        try:
            names = json.loads(indices[0].read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{indices[0]} is not an index of safetensors shards: no weight_map") from error
        files = [path / file for file in sorted(set(names.values()))]
        if absent := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{indices[0]} names files that are not there: {', '.join(absent)}")
        tensors = {name: tensor for file in files for name, tensor in _map_safetensors(file).items()}
        if absent := sorted(set(names) - set(tensors)):
            raise ValueError(f"{indices[0]} names tensors that its files do not hold: {', '.join(absent)}")
        return tensors
    if len(indices) > 1 or len(files) != 1:
        raise ValueError(
            f"{path} holds {len(files)} .safetensors files and {len(indices)} indices; one file or one index is needed"
        )
    return _map_safetensors(files[0])


def _map_safetensors(file: Path) -> dict[str, np.ndarray]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        data = np.memmap(file, np.uint8, "r", offset=8 + length) if size > 8 + length else np.empty(0, np.uint8)
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if end > data.size:
                raise ValueError(f"{name} ends behind the end of the file")
            tensors[name] = data[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return tensors
    except (struct.error, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def _write_safetensors(file: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # diffusers and transformers ask for this entry
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    _write(file, struct.pack("<Q", len(text)), text, *tensors.values())


def _write(file: Path, *parts: bytes | np.ndarray) -> None:
    """Whole or not at all: written beside `file`, then renamed."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            for part in parts:
                stream.write(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


# ---- torch files -----------------------------------------------------------------------------------------------------
#
# A `.pt` file is a zip of raw storages and one pickle that names them. Only the few constructors of a dict of tensors
# mean anything here, everything else in the pickle becomes an inert stand-in: reading needs no torch and runs no code
# of the file.

_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


class _Foreign:
    """What a pickle's other classes and functions become."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __setstate__(self, state: Any) -> None:
        del state


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], storage: Callable[[str], np.ndarray]):
        super().__init__(stream)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in _STORAGES:
            return _DTYPES[_STORAGES[name]]
        return _Foreign

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, dtype, key, _, _ = pid
        if not isinstance(dtype, np.dtype):
            raise ValueError("it holds a storage of a kind that is not known here")
        return self._storage(key).view(dtype)


def _rebuild_tensor(storage: np.ndarray, offset: int, shape: Any, stride: Any, *_: Any) -> np.ndarray:
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if offset < 0 or min(stride, default=0) < 0 or (0 not in shape and last >= storage.size):
        raise ValueError("a tensor reaches outside its storage")
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)


def _map_torch(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a state dict, bare or under "model" beside other things of a run; mapped, not loaded."""
    try:
        with zipfile.ZipFile(file) as archive:
            (root,) = (name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("/data.pkl"))
            data = np.memmap(file, np.uint8, "r")

            def storage(key: str) -> np.ndarray:
                info = archive.getinfo(f"{root}data/{key}")
                if info.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("its storages are compressed")
                # The local header, 30 bytes and two names, may differ in length from the one in the directory.
                name, extra = struct.unpack("<HH", data[info.header_offset + 26 : info.header_offset + 30].tobytes())
                begin = info.header_offset + 30 + name + extra
                return data[begin : begin + info.file_size]

            with archive.open(f"{root}data.pkl") as stream:
                state = _Unpickler(stream, storage).load()
    except (
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise ValueError(f"{file} is not a torch file of the zip form, whole and of plain tensors: {error}") from error
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    if not isinstance(state, dict):
        raise ValueError(f"{file} does not hold a dict of tensors")
    return {name: value if isinstance(value, np.ndarray) else np.empty(0) for name, value in state.items()}
