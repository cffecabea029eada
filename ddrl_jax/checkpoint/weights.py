"""Weights in and out: published files of every family of networks <-> (graphdef, params).

A family's module names its parameters (`cosmos_names` is an example); this one matches them with a file's tensors and
moves the numbers, a tensor at a time. Nothing is skipped in silence: one error lists every missing, unexpected and
misshapen name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from ddrl_jax.checkpoint import cosmos_names, qwen_names, safetensors_files, torch_files, wan_vae_names
from ddrl_jax.checkpoint.entries import Entry
from ddrl_jax.checkpoint.safetensors_files import Spec
from ddrl_jax.parallel.mesh import fsdp_sharding

Layout = Literal["official", "diffusers"]


# The modules that know a family's names: what each must have is what this one asks of them.
FAMILIES: tuple[Any, ...] = (cosmos_names, wan_vae_names, qwen_names)


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    which: Literal["raw", "ema"] = "raw",
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Reads a network: a Cosmos DiT, the Wan2.1 VAE or a Qwen2.5 text tower, recognised by config.json or names.

    Args:
      path: a `.safetensors` file, a folder with one or with shards and their index, with a config.json if it is of the
        diffusers or Hugging Face form, or an official torch file, which a child process with torch makes a
        `.safetensors` of first. Sizes come from config.json, or from the tensors' shapes.
      which: of an official DiT file, "raw" the `net.*` weights or "ema" the `net_ema.*` ones; the others are left
        alone.
      mesh: shard every parameter over its fsdp axis; None: on the default device. Each device reads its own part only,
        and the host's memory holds two devices' parts of one parameter at most.
      dtype: of the parameters; None is float32, which holds float32 and bfloat16 files exactly.
      compute_dtype: what the network computes in; None is the parameters' dtype.

    Returns:
      (graphdef, params): `nnx.merge(graphdef, params)` is a `CosmosDiT`, a `WanVAE` or a `QwenText`.

    Raises:
      ValueError: nothing readable there, none of these networks, names or shapes that do not fit (all of them listed),
        a mesh without an fsdp axis, float64 without jax_enable_x64, or no torch for a torch file.
    """
    path = Path(path)
    if which not in ("raw", "ema"):
        raise ValueError(f'which={which!r}: must be "raw" or "ema"')
    if mesh is not None and "fsdp" not in mesh.axis_names:
        raise ValueError(f"mesh has the axes {mesh.axis_names}: one of them must be fsdp")
    param_dtype = np.dtype("float32" if dtype is None else dtype)
    compute = np.dtype(param_dtype if compute_dtype is None else compute_dtype)
    for name, value in (("dtype", param_dtype), ("compute_dtype", compute)):
        if jax.dtypes.canonicalize_dtype(value) != value:
            raise ValueError(f"{name}={value.name}: needs jax_enable_x64")

    is_torch = path.suffix in torch_files.SUFFIXES and not path.is_dir()
    tensors = safetensors_files.read(torch_files.to_safetensors(path) if is_torch else path)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    given = _config_json(path)
    family = _recognise(path, shapes, given)
    config, layout = family.read_config(path, shapes, given, which)
    config = dataclasses.replace(config, param_dtype=param_dtype.name, dtype=compute.name)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: family.MODEL(config, rngs=nnx.Rngs(0))))
    flat = {".".join(map(str, key)): (key, leaf) for key, leaf in nnx.to_flat_state(abstract)}
    entries = {entry.ours: entry for entry in family.entries(config, layout, which)}
    if flat.keys() != entries.keys():
        raise AssertionError(f"{family.__name__} does not name {sorted(flat.keys() ^ entries.keys())}")
    wanted = {name: entry.file_shape(flat[entry.ours][1].shape) for entry in entries.values() for name in entry.names}
    found = {name: shape for name, shape in shapes.items() if not family.ignored(name, layout, which)}
    _check(f"{path} does not fit a {family.TITLE} in the {layout} form", wanted, found)

    if mesh is None:
        default = jnp.zeros(()).sharding
        shardings = jax.tree.map(lambda _: default, abstract)
    else:
        shardings = fsdp_sharding(mesh, abstract)
    placed = {".".join(map(str, key)): leaf.get_value() for key, leaf in nnx.to_flat_state(shardings)}
    state = []
    for ours, (key, leaf) in flat.items():
        entry = entries[ours]
        rows = [_as_ours(tensors[name], entry) for name in entry.names]
        state.append((key, leaf.replace(_place(rows, entry.rows > 0, leaf.shape, param_dtype, placed[ours]))))
    return graphdef, nnx.from_flat_state(state)


def _config_json(path: Path) -> dict[str, Any] | None:
    """What the config.json of a folder, or beside a file, says; None where there is none."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return None
    try:
        given = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{file} is not a JSON object: it is a {type(given).__name__}")
    return given


def _recognise(path: Path, shapes: Mapping[str, Any], given: Mapping[str, Any] | None) -> Any:
    for family in FAMILIES:
        if family.recognise(shapes.keys(), given):
            return family
    kinds = {key: given[key] for key in ("_class_name", "architectures", "model_type") if key in given} if given else {}
    says = f" (its config.json says {json.dumps(kinds)})" if kinds else ""
    titles = ", ".join(family.TITLE for family in FAMILIES)
    raise ValueError(f"{path} is none of the networks that can be loaded{says}: {titles}")


def _check(what: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises one ValueError with every name that is missing, unexpected or misshapen."""
    parts = (
        ("missing", [name for name in wanted if name not in found]),
        ("unexpected", sorted(set(found) - set(wanted))),
        (
            "misshapen",
            [
                f"{name} is {found[name]}, not {want}"
                for name, want in wanted.items()
                if name in found and found[name] != want
            ],
        ),
    )
    if any(names for _, names in parts):
        lists = (f"{len(names)} {word}: {', '.join(names)}" for word, names in parts if names)
        raise ValueError(f"{what}: {'; '.join(lists)}")


def _as_ours(tensor: np.ndarray, entry: Entry) -> np.ndarray:
    """A file's tensor as a view with our axes."""
    if entry.ones:
        tensor = tensor.reshape(tensor.shape[: -entry.ones])
    return tensor if entry.axes is None else tensor.transpose(entry.axes)


def _place(
    rows: list[np.ndarray], stacked: bool, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding
) -> jax.Array:
    """One parameter onto its devices; a cut that several hold is read once.

    Not `jax.make_array_from_callback`, which has the cuts of all of a host's devices in its memory at the same time.
    """
    cuts: dict[str, tuple[Any, list[jax.Device]]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        cuts.setdefault(str(index), (index, []))[1].append(device)
    pieces = []
    for index, devices in cuts.values():
        cut = _cut(rows, stacked, shape, dtype, index)
        # Waited for, so that the next cut but one has this one's memory (JAX lets go of it a call later).
        pieces += jax.block_until_ready([jax.device_put(cut, device) for device in devices])
        del cut
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _cut(
    rows: list[np.ndarray], stacked: bool, shape: tuple[int, ...], dtype: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    """What one device holds of a parameter; only that is read from disk."""
    if not stacked:
        return rows[0][index].astype(dtype)
    chosen = rows[index[0]]
    out = np.empty((len(chosen), *chosen[0][index[1:]].shape), dtype)
    for into, row in zip(out, chosen, strict=True):
        into[...] = row[index[1:]]
    return out


def save_pretrained(
    path: str | os.PathLike[str],
    graphdef: nnx.GraphDef,
    params: Any,
    *,
    layout: Layout = "official",
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 10 * 10**9,
) -> None:
    """Writes a network so that `load_pretrained` gives back the same bits. A tensor at a time is in the host's memory.

    Args:
      path: "official": the `.safetensors` or (by a child process with torch) `.pt` file to write, or a folder to get a
        `model.safetensors`.
        "diffusers": the folder. Folders are made if missing; their names end in no file's suffix, such as `.bin`.
      graphdef: of a `CosmosDiT`, a `WanVAE` or a `QwenText`.
      params: its parameters.
      layout: "official", names as the network's authors publish them (a DiT's with `net.`), or "diffusers", those of
        diffusers or transformers, with a config.json. An official text tower needs its published config.json beside it.
      dtype: of the tensors written; None: as the parameters are.
      max_shard_bytes: a diffusers folder with more is split into files of at most this size (one tensor at least), with
        an index.

    Raises:
      ValueError: an unknown layout, another model, one that the layout cannot express, or a file where a folder is to
        be.
    """
    path = Path(path)
    model = nnx.merge(graphdef, params)
    family = next((f for f in FAMILIES if isinstance(model, f.MODEL)), None)
    if family is None:
        kinds = ", ".join(f.MODEL.__name__ for f in FAMILIES)
        raise ValueError(f"graphdef is of a {type(model).__name__}; it must be one of {kinds}")
    if layout not in ("official", "diffusers"):
        raise ValueError(f'layout={layout!r}: must be "official" or "diffusers"')
    # "Cosmos-Predict2.5-2B" is a folder's name, "model.bin" is not.
    to_file = layout == "official" and path.suffix in (".safetensors", *torch_files.SUFFIXES)
    if re.fullmatch(r"\.[A-Za-z]+", path.suffix) and not path.is_dir() and not to_file:
        wanted = "a folder" if layout == "diffusers" else "a .safetensors, .pt or .pth file or a folder"
        raise ValueError(f"path={path}: must be {wanted} for layout={layout!r}, not a {path.suffix} file")
    file = path if to_file else path / "model.safetensors"
    if file.parent.exists() and not file.parent.is_dir():
        raise ValueError(f"path={path}: {file.parent} must be a folder; it is a file")

    leaves = {".".join(map(str, key)): leaf[...] for key, leaf in nnx.to_flat_state(nnx.state(model))}
    parts: dict[str, tuple[Entry, int]] = {}  # and written in their order: what belongs together is in one shard
    for entry in family.entries(model.config, family.LAYOUTS[layout]):
        parts |= {name: (entry, row) for row, name in enumerate(entry.names)}
    specs = []
    for name, (entry, _) in sorted(parts.items()):
        leaf = leaves[entry.ours]
        specs.append(Spec(name, np.dtype(leaf.dtype if dtype is None else dtype), entry.file_shape(leaf.shape)))

    def tensors() -> Iterator[np.ndarray]:
        for spec in specs:
            entry, row = parts[spec.name]
            yield _as_file(_fetch(leaves[entry.ours], row if entry.rows else None), entry).astype(spec.dtype)

    file.parent.mkdir(parents=True, exist_ok=True)
    if layout == "official" and file.suffix == ".safetensors":
        safetensors_files.write_file(file, specs, tensors())
    elif layout == "official":
        python = torch_files.interpreter()  # asked for before anything is written
        between = file.with_name(f".{file.name}.{os.getpid()}.safetensors")
        try:
            safetensors_files.write_file(between, specs, tensors())
            torch_files.to_torch(between, file, python)
        finally:
            between.unlink(missing_ok=True)
    else:
        safetensors_files.write_folder(path, family.STEM, specs, tensors(), max_shard_bytes)
        text = json.dumps(family.config_json(model.config), indent=2)
        safetensors_files.write_text(path / "config.json", text)


@jax.jit
def _row(leaf: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, row, keepdims=False)


def _fetch(leaf: jax.Array, row: int | None) -> np.ndarray:
    """A parameter, or a stacked one's row, on the host.

    Cut out on the devices and taken from a copy: an array remembers what it was once turned into, and the parameters
    would end up on the host as a whole.
    """
    return np.asarray(jnp.copy(leaf) if row is None else _row(leaf, row))


def _as_file(ours: np.ndarray, entry: Entry) -> np.ndarray:
    """The inverse of `_as_ours`."""
    tensor = ours if entry.axes is None else ours.transpose(np.argsort(entry.axes))
    return tensor.reshape(*tensor.shape, *(1,) * entry.ones)
