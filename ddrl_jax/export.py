"""`--mode=export`: a run's newest checkpoint as published weights.

Only the chosen set of weights is read, not the optimizer's state, and it leaves the devices a tensor at a time. A run
that still trains can be exported: nothing of it is written to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx
from ml_collections import ConfigDict

from ddrl_jax import build
from ddrl_jax.checkpoint import save_pretrained, torch_files
from ddrl_jax.checkpoint.lora_files import save_lora
from ddrl_jax.checkpoint.manager import Checkpoints, UnreadableError
from ddrl_jax.config import ConfigError, check_same_run
from ddrl_jax.models.lora import Lora, merge_lora
from ddrl_jax.parallel import mesh as mesh_lib

RECORD = "export.json"
FILES = {"safetensors": "model.safetensors", "pt": "model.pt"}


def run(config: ConfigDict, workdir: Path, *, arguments: Sequence[str] = ()) -> bool:
    """Writes export.weights of the newest checkpoint in export.format to the folder export.out.

    Of a run with lora.rank these are an adapter's: merged into model.checkpoint's, or alone with export.lora.

    Args:
      config: validated; its sizes are the run's.
      workdir: the run's.
      arguments: of this call, for the record.

    Returns:
      True.

    Raises:
      ConfigError: no run or no checkpoint in `workdir`, no EMA in it, no torch for the pt format, or a folder that
        holds something else.
    """
    for line in check_same_run(config, workdir):
        print(line)
    if not (workdir / "config.json").exists():
        raise ConfigError(f"workdir={str(workdir)!r}: holds no run to export; train one there first")
    export = config.export
    python = None
    if export.out:
        _check_out(Path(export.out))
    try:
        if export.format == "pt":
            # Looked for before minutes of reading; the sidecar's own environment has torch.
            python = torch_files.interpreter(build.torch_python(config))
        step, params = read_weights(config, workdir, export.weights, None if export.step < 0 else export.step)
        # Unasked, every export has a folder of its own: a checkpoint that it was made of may be gone.
        kind = "-adapter" if export.lora == "separate" else ""
        name = f"{export.format}-{export.weights}-{export.dtype}-step{step}{kind}"
        out = Path(export.out) if export.out else workdir / "export" / name
        _check_out(out)
        record = {
            "step": step,
            "run": str(workdir),
            "weights": export.weights,
            "command": shlex.join(["python", "-m", "ddrl_jax.main", *arguments]),
        }
        options: dict[str, Any] = {"format": export.format, "dtype": export.dtype, "python": python}
        graphdef = build.graphdef(config)
        if config.lora.rank > 0:
            record |= {"lora": export.lora, "rank": config.lora.rank, "alpha": config.lora.alpha}
            options |= {"lora": (params, config.lora.alpha), "separate": export.lora == "separate"}
            params = (
                build.abstract_params(config)
                if export.lora == "separate"
                else build.pretrained_params(config, build.make_mesh(config))
            )
        write(out, graphdef, params, record=record, **options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config.export.format={export.format!r}: {error}") from error
    print(f"export: {export.weights} weights of step {step} in {out}")
    return True


def _check_out(out: Path) -> None:
    try:
        check_folder(out)
        out.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise ConfigError(f"config.export.out={str(out)!r}: {error}") from error


def read_weights(config: ConfigDict, workdir: Path, weights: str, step: int | None = None) -> tuple[int, Any]:
    """(step, trained parameters) of a run's checkpoint, on this machine's mesh; nothing else is read.

    With lora.rank the trained parameters are the adapter. `step`: None is the newest.

    Args:
      config: of the run.
      workdir: the run's.
      weights: "raw" the trained ones, "ema" their moving average.

    Raises:
      ConfigError: no readable checkpoint, or a run without EMA.
    """
    build.check_adapter_base(config, workdir)
    if weights == "ema" and config.train.ema_rate == 0:
        raise ConfigError("config.export.weights='ema': the run keeps none (train.ema_rate is 0); take raw")

    def skipped(tree: Any) -> Any:
        return jax.tree.map(lambda _: ..., tree)

    like = build.abstract_state(config)
    placed = mesh_lib.fsdp_sharding(build.make_mesh(config), like)
    like = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like, placed)
    others = {
        field: skipped(getattr(like, field)) for field in ("opt_state", "old", "ema" if weights == "raw" else "params")
    }
    with Checkpoints(workdir / "checkpoints/ddrl", read_only=True) as checkpoints:
        try:
            restored = checkpoints.restore(dataclasses.replace(like, **others), step=step)
        except UnreadableError as error:
            raise ConfigError(f"workdir={str(workdir)!r}: {error}") from error
    if restored is None:
        raise ConfigError(f"workdir={str(workdir)!r}: holds no checkpoint yet; let the training save one first")
    step, s = restored
    return step, s.params if weights == "raw" else s.ema


def write(
    out: Path,
    graphdef: nnx.GraphDef,
    params: Any,
    *,
    format: str,
    dtype: str | None = None,
    record: Mapping[str, Any] | None = None,
    python: str | os.PathLike[str] | None = None,
    lora: tuple[Lora, float] | None = None,
    separate: bool = False,
) -> None:
    """Writes the folder `out`: the weights and export.json, which names them with their SHA-256. Whole or not at all.

    Args:
      out: a folder that is not there, is empty, or is an earlier export, which is replaced.
      graphdef: of the network.
      params: its parameters; only their shapes matter with `separate`.
      format: "safetensors" (model.safetensors, official names), "pt" (the same as a torch state dict, model.pt) or
        "diffusers" (config.json and one file or shards with an index).
      dtype: of the tensors; None: the parameters'.
      record: what else export.json says.
      python: for "pt", an interpreter with torch; None: one is looked for.
      lora: an adapter of the network and its alpha, merged into the weights.
      separate: write the adapter alone instead, "safetensors" in peft's layout and "diffusers" in that.

    Raises:
      ValueError: `out` holds something else, an unknown format, one that cannot express the network, or no torch.
    """
    if format not in (*FILES, "diffusers"):
        raise ValueError(f"format={format!r}: must be safetensors, pt or diffusers")
    if separate and (lora is None or format == "pt"):
        raise ValueError(f"separate: needs an adapter, and format safetensors or diffusers; format is {format!r}")
    check_folder(out)
    if lora is not None and not separate:
        adapter, alpha = lora
        (rank,) = {pair["a"].shape[-1] for pair in adapter.values()}
        params = jax.jit(merge_lora, static_argnums=2)(params, adapter, alpha / rank)
    part = out.with_name(f".{out.name}.{os.getpid()}.partial")
    part.mkdir(parents=True)
    try:
        if separate:
            assert lora is not None
            layout: Literal["peft", "diffusers"] = "diffusers" if format == "diffusers" else "peft"
            config = nnx.merge(graphdef, params).config
            save_lora(part, lora[0], config, alpha=lora[1], layout=layout, dtype=dtype)
        elif format == "diffusers":
            save_pretrained(part, graphdef, params, layout="diffusers", dtype=dtype)
        else:
            save_pretrained(part / FILES["safetensors"], graphdef, params, layout="official", dtype=dtype)
        if format == "pt":
            torch_files.to_torch(part / FILES["safetensors"], part / FILES["pt"], python)
            (part / FILES["safetensors"]).unlink()
        files = {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in sorted(part.iterdir())}
        kept = {"format": format, "dtype": dtype or "as trained", **(record or {}), "files": files}
        (part / RECORD).write_text(json.dumps(kept, indent=1))
        if out.exists():
            # A folder cannot be put in the place of another at once; a kill between leaves the old one under this name.
            old = out.with_name(f".{out.name}.{os.getpid()}.old")
            out.rename(old)
            part.rename(out)
            shutil.rmtree(old)
        else:
            part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_folder(out: Path) -> None:
    """Raises ValueError unless `out` is not there, is empty, or holds an export and nothing else."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError("must be a folder, to be made or exported to before; it is a file")
    found = {file.name for file in out.iterdir()}
    try:
        files = set(json.loads((out / RECORD).read_text())["files"]) if RECORD in found else set()
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"its {RECORD} is no record of an export ({error}); take another folder") from error
    # What loading a model.pt leaves beside it was made by us, too.
    known = files | {f"{name}.safetensors" for name in files} | {RECORD}
    if foreign := sorted(found - known):
        raise ValueError(f"holds {', '.join(foreign[:3])}, which no export wrote; take another folder")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
