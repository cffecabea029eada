"""Low-rank adapters of a Cosmos DiT on disk, in peft's layout and in diffusers'.

Both hold lora_A (r, d_in) and lora_B (d_out, r) for each layer of each block, under diffusers' names of the layers.
peft says rank and alpha in an adapter_config.json, diffusers in the safetensors header, under `lora_adapter_metadata`.
A file that says neither means alpha = r (`specs/cosmos.md`, traps).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from ddrl_jax.checkpoint import cosmos_names, safetensors_files
from ddrl_jax.checkpoint.entries import Entry
from ddrl_jax.checkpoint.safetensors_files import Spec
from ddrl_jax.models.cosmos_dit import CosmosDiT, CosmosDiTConfig
from ddrl_jax.models.lora import Lora

_METADATA = "lora_adapter_metadata"
_CONFIG = "adapter_config.json"
_FILES = {"peft": "adapter_model.safetensors", "diffusers": "pytorch_lora_weights.safetensors"}
_PREFIX = {"peft": "base_model.model.", "diffusers": "transformer."}
# Some writers put the adapter's name, "default", behind lora_A.
_NAME = re.compile(r"(?:base_model\.model\.|transformer\.)?(?:net\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")


class Adapter(NamedTuple):
    """What a file holds: its layers' (A, B) by the layer's name in the file, without prefix; rank and alpha."""

    layers: dict[str, tuple[np.ndarray, np.ndarray]]
    rank: int
    alpha: float


def load_lora(path: str | os.PathLike[str], config: CosmosDiTConfig) -> tuple[Lora, float]:
    """An adapter (float32) and its alpha.

    Args:
      path: an adapter's `.safetensors` file, or the folder with it; layers by their diffusers or official names.
      config: of the network that it adapts.

    Raises:
      ValueError: no adapter there, or not one of this network: layers that it has not, are only in some of its blocks,
        or have other sizes, all of them listed; or a kind of adapter that is not W + alpha/r B A.
    """
    path = Path(path)
    adapter = read_adapter(path)
    layers = dict(adapter.layers)
    lora: Lora = {}
    problems = []
    for entry, theirs in _modules(config):
        for names in theirs:
            found = [name for name in names if name in layers]
            if not found:
                continue
            if absent := [name for name in names if name not in layers]:
                problems.append(f"missing {', '.join(absent)}")
            pairs = [layers.pop(name) for name in found]
            if len({(a.shape, b.shape) for a, b in pairs}) > 1:
                problems.append(f"{', '.join(found)} are of different sizes")
            elif not absent:
                a = np.stack([a.T for a, _ in pairs]).astype(np.float32)
                b = np.stack([b.T for _, b in pairs]).astype(np.float32)
                stacked = entry.rows > 0
                lora[entry.ours.removesuffix(".kernel")] = {
                    "a": jnp.asarray(a if stacked else a[0]),
                    "b": jnp.asarray(b if stacked else b[0]),
                }
    if layers:
        problems.append(f"unexpected {', '.join(sorted(layers))}")
    wanted = _shapes(config)
    for ours, pair in lora.items():
        if (pair["a"].shape[-2], pair["b"].shape[-1]) != wanted[ours]:
            problems.append(f"{ours} is ({pair['a'].shape[-2]}, {pair['b'].shape[-1]}), not {wanted[ours]}")
    if problems:
        raise ValueError(f"{path} does not fit the Cosmos DiT: {'; '.join(problems)}")
    return lora, adapter.alpha


def save_lora(
    path: str | os.PathLike[str],
    lora: Mapping[str, Mapping[str, Any]],
    config: CosmosDiTConfig,
    *,
    alpha: float,
    layout: Literal["peft", "diffusers"] = "diffusers",
    dtype: DTypeLike | None = None,
) -> None:
    """Writes an adapter so that `load_lora` gives back the same bits.

    Args:
      path: the folder, made if missing. "peft": adapter_model.safetensors and adapter_config.json; "diffusers":
        pytorch_lora_weights.safetensors.
      lora: the adapter.
      config: of the network that it adapts.
      alpha: scale times rank.
      layout: "peft" or "diffusers".
      dtype: of the tensors; None: the adapter's.

    Raises:
      ValueError: an unknown layout, no layers, layers of different ranks, or ones that the network has not.
    """
    if layout not in _FILES:
        raise ValueError(f'layout={layout!r}: must be "peft" or "diffusers"')
    ranks = {pair["a"].shape[-1] for pair in lora.values()}
    if len(ranks) != 1:
        raise ValueError(f"an adapter has one rank; the layers' ranks are {sorted(ranks)}")
    (rank,) = ranks
    modules = {entry.ours.removesuffix(".kernel"): diffusers for entry, (diffusers, _) in _modules(config)}
    if foreign := sorted(set(lora) - set(modules)):
        raise ValueError(f"the network has no layers {', '.join(foreign)}")
    parts: dict[str, tuple[Any, int | None]] = {}
    targets = []
    for ours, pair in lora.items():
        names, stacked = modules[ours], pair["a"].ndim == 3
        # Not the bare "to_q": peft takes every layer whose name ends so.
        targets.append(re.sub(r"^transformer_blocks\.\d+\.", "", names[0]))
        for row, name in enumerate(names):
            for letter in "ab":
                full = f"{_PREFIX[layout]}{name}.lora_{letter.upper()}.weight"
                parts[full] = (pair[letter], row if stacked else None)
    specs = [
        Spec(name, np.dtype(leaf.dtype if dtype is None else dtype), tuple(leaf.shape[:-3:-1]))
        for name, (leaf, _) in sorted(parts.items())
    ]

    def tensors() -> Iterator[np.ndarray]:
        for spec in specs:
            leaf, row = parts[spec.name]
            yield np.asarray(leaf if row is None else leaf[row]).T.astype(spec.dtype)

    said = {"r": rank, "lora_alpha": alpha, "target_modules": sorted(targets), "lora_bias": False, "use_dora": False}
    said |= {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = None
    if layout == "diffusers":
        metadata = {_METADATA: json.dumps({f"transformer.{key}": value for key, value in said.items()}, sort_keys=True)}
    safetensors_files.write_file(folder / _FILES[layout], specs, tensors(), metadata)
    if layout == "peft":
        text = json.dumps({"peft_type": "LORA", "bias": "none", **said}, indent=2)
        safetensors_files.write_text(folder / _CONFIG, text)


def read_adapter(path: Path) -> Adapter:
    """Any network's adapter, in either layout or without prefix. Errors as in `load_lora`."""
    tensors = safetensors_files.read(path)
    pairs: dict[str, dict[str, np.ndarray]] = {}
    foreign = []
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or tensor.ndim != 2:
            foreign.append(name)
        else:
            pairs.setdefault(match[1], {})[match[2]] = tensor
    halves = sorted(name for name, pair in pairs.items() if len(pair) != 2)
    if foreign or halves or not pairs:
        parts = [f"no adapter's tensors: {', '.join(foreign)}"] if foreign else []
        parts += [f"without both of lora_A and lora_B: {', '.join(halves)}"] if halves else []
        raise ValueError(f"{path} is no low-rank adapter: {'; '.join(parts) or 'it is empty'}")
    layers = {name: (pair["A"], pair["B"]) for name, pair in pairs.items()}
    ranks = {a.shape[0] for a, _ in layers.values()} | {b.shape[1] for _, b in layers.values()}
    if len(ranks) != 1:
        raise ValueError(f"{path}: an adapter of one rank is needed; its layers' are {sorted(ranks)}")
    (rank,) = ranks
    return Adapter(layers, rank, _alpha(path, rank))


def _alpha(path: Path, rank: int) -> float:
    """What config or header say, after a look for what would make the adapter another formula."""
    file = next(path.glob("*.safetensors")) if path.is_dir() else path
    metadata = safetensors_files.read_metadata(file)
    beside = file.with_name(_CONFIG)
    try:
        if _METADATA in metadata:
            source = f"{file}: {_METADATA}"
            given = {k.removeprefix("transformer."): v for k, v in json.loads(metadata[_METADATA]).items()}
        elif beside.is_file():
            source, given = str(beside), dict(json.loads(beside.read_text()))
        else:
            warnings.warn(
                f"{file} says no alpha; it is taken to be the rank, {rank}: scale 1", RuntimeWarning, stacklevel=4
            )
            return float(rank)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{beside if _METADATA not in metadata else file}: no JSON object ({error})") from error
    for field in ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if given.get(field):
            raise ValueError(f"{source}: {field} is {given[field]!r}; only W + lora_alpha/r B A is known here")
    if given.get("r", rank) != rank:
        raise ValueError(f"{source}: r is {given['r']!r}; the tensors' rank is {rank}")
    alpha = given.get("lora_alpha", rank)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ValueError(f"{source}: lora_alpha is {alpha!r}; a number is needed")
    return float(alpha)


def _modules(config: CosmosDiTConfig) -> list[tuple[Entry, tuple[list[str], list[str]]]]:
    """Every layer with a kernel and its names, one a block, in the diffusers and the official form."""
    # The names are the same whatever the grid, which only the official form of weights cannot say.
    known = {field: getattr(CosmosDiTConfig, field) for field in ("patch", "max_grid", "rope_ratios")}
    official = cosmos_names.entries(dataclasses.replace(config, **known), "official")
    found = []
    for entry, other in zip(cosmos_names.entries(config, "diffusers"), official, strict=True):
        if entry.ours.endswith(".kernel"):
            theirs = [[n.removeprefix("net.").removesuffix(".weight") for n in e.names] for e in (entry, other)]
            found.append((entry, (theirs[0], theirs[1])))
    return found


def _shapes(config: CosmosDiTConfig) -> dict[str, tuple[int, int]]:
    """(d_in, d_out) of every layer."""
    abstract = nnx.split(nnx.eval_shape(lambda: CosmosDiT(config, rngs=nnx.Rngs(0))))[1]
    flat = ((".".join(map(str, key)), leaf.shape[-2:]) for key, leaf in nnx.to_flat_state(abstract))
    return {path.removesuffix(".kernel"): shape for path, shape in flat if path.endswith(".kernel")}
