"""--mode=check: is everything there that a run needs? Each thing is looked at by itself, before hours depend on it.

Loads the weights, embeds two captions, sends a clip through the VAE and back, runs the network once, scores a clip in
the sidecar, and counts bytes on devices and disk. One line each; a failed one says what to change, and the rest is
still looked at. Writes nothing but what a torch file is converted to, once, beside it.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console

from ddrl_jax import build, scoring
from ddrl_jax.config import ConfigError, check_same_run
from ddrl_jax.data import latent_cache, source
from ddrl_jax.data.video import read_image
from ddrl_jax.data.video_folder import VideoFolder
from ddrl_jax.logbook import Logbook
from ddrl_jax.parallel import mesh as mesh_lib

CAPTIONS = ("a red ball rolls down a green hill", "two cats sleep on a blue sofa")
GIB = 1 << 30
WARNING = "warning: "  # begins the line of what may be right


class Skipped(Exception):
    """Needs what another check did not find."""


class _Report:
    """Runs checks, prints a line each, and keeps what they found for the ones after them."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []

    def need(self, name: str) -> Any:
        if name not in self.found:
            raise Skipped(f"not looked at: needs {name}")
        return self.found[name]

    def check(self, name: str, look: Callable[[], tuple[Any, str]]) -> None:
        """`look` returns what it found and a line about it."""
        try:
            self.found[name], line = look()
            far = line.startswith(WARNING)
            self.console.print(f"{'[yellow]WARN' if far else '[green]ok  '}[/] {name:<12}", end="")
            line = line.removeprefix(WARNING)
        except Skipped as error:
            line = str(error)
            self.console.print(f"[yellow]--  [/yellow] {name:<12}", end="")
        except (ValueError, OSError, RuntimeError) as error:  # the last: a device's memory is full
            line = " ".join(str(error).split())
            self.failed.append(name)
            self.console.print(f"[red]FAIL[/red] {name:<12}", end="")
        self.console.print(line, markup=False)


def run(config: ConfigDict, workdir: Path) -> bool:
    """Prints what was found. Returns whether nothing failed."""
    report = _Report()
    report.check("workdir", lambda: _workdir(config, workdir))
    report.check("devices", lambda: _devices(config))
    report.check("memory", lambda: _memory(config, report.need("devices")))
    report.check("disk", lambda: _disk(config, workdir))
    report.check("data", lambda: _data(config))
    if config.eval.prompts:
        report.check("prompts", lambda: _prompts(config))
    report.check("codec", lambda: _codec(config, report.need("devices")))
    report.check("text", lambda: _text(config, report.need("devices")))
    report.check("network", lambda: _network(config, report.need("devices")))
    report.check("sidecar", lambda: _sidecar(config, workdir, report))
    if report.failed:
        report.console.print(f"{len(report.failed)} to mend: {', '.join(report.failed)}")
    return not report.failed


def _workdir(config: ConfigDict, workdir: Path) -> tuple[Any, str]:
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"workdir={str(workdir)!r}: is a file; it must be a folder")
    if (workdir / "base.json").exists():
        build.check_adapter_base(config, workdir)
    lines = check_same_run(config, workdir)
    there = "holds a run that would be resumed" if (workdir / "config.json").exists() else "would be a new run"
    return workdir, "; ".join([f"{workdir} {there}", *lines])


def _devices(config: ConfigDict) -> tuple[Mesh, str]:
    mesh = build.make_mesh(config)
    build.check_mesh(config, mesh)
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return mesh, f"{jax.device_count()} x {jax.devices()[0].device_kind}: {shape}"


def _memory(config: ConfigDict, mesh: Mesh) -> tuple[dict[str, float], str]:
    """What stays on a device: activations come on top, and depend on micro_batch and model.remat."""
    base = build.abstract_params(config)
    trained = jax.eval_shape(lambda p: build.trained_params(config, p), base)
    state_bytes = _bytes(mesh, build.abstract_state(config))
    rollouts = config.rollout.conditions * config.rollout.group_size
    per_device = -(-rollouts // mesh_lib.batch_shards(mesh))
    rows = (mesh_lib.batch_shards(mesh), *build.latent_shape(config))  # a rollout a data group
    latent = math.prod(mesh_lib.latent_sharding(mesh, rows).shard_shape(rows))
    needs = {
        "state": state_bytes,
        # Their sum, which begins with the data loss's, that of a micro-batch, and that of a step where it is logged.
        "gradients": (2 + config.log.step_grad_norms) * _bytes(mesh, trained),
        "frozen base": _bytes(mesh, base) if config.lora.rank > 0 else 0,
        "trajectory": 3 * 4 * latent * build.trained_step_count(config) * per_device  # x, x_next, history
        if config.train.trajectory == "device"
        else 0,
        "text": config.rollout.conditions * config.text.length * config.text.dim * 2,
        "text tower": _files(config.text_encoder.path) / mesh.shape["fsdp"]
        if config.text_encoder.where == "device"
        else 0,
        "codec": _files(config.codec.path),
    }
    gib = {name: value / GIB for name, value in needs.items() if value}
    line = ", ".join(f"{name} {value:.2f}" for name, value in gib.items())
    line += f": {sum(gib.values()):.2f} GiB a device before activations"
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        line += f", of {limit / GIB:.1f}"
        if sum(gib.values()) * GIB > limit:
            raise ConfigError(f"config.mesh.fsdp={config.mesh.fsdp}: {line}; shard over more devices")
    return gib, line


def _files(path: str) -> int:
    """Bytes of a file, or of a folder's weights."""
    if not path:
        return 0
    files = [Path(path)] if Path(path).is_file() else list(Path(path).glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def _bytes(mesh: Mesh, tree: Any) -> float:
    shardings = mesh_lib.fsdp_sharding(mesh, tree)
    sizes = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, tree, shardings)
    return float(sum(jax.tree.leaves(sizes)))


def _disk(config: ConfigDict, workdir: Path) -> tuple[float, str]:
    """Checkpoints in the workdir; latents, and features of captions where they are cached, beside the videos."""
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(build.abstract_state(config)))
    needs = {workdir: held * (config.checkpoint.keep + 1) / GIB}
    data = Path(config.data.path)
    if config.data.name == "videos" and (data / "videos").is_dir() and not latent_cache.exists(data / source.LATENTS):
        clips = len(list((data / "videos").iterdir()))
        clip = 4 * math.prod(build.latent_shape(config))
        clip += 2 * config.text.length * config.text.dim * (config.text_encoder.where == "cached")
        needs[data] = clips * clip / GIB
    lines, short = [], None
    for folder, need in needs.items():
        there = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(there).free / GIB
        lines.append(f"{need:.1f} GiB needed in {folder}, {free:.1f} free")
        short = short or (folder if free < need else None)
    line = "; ".join(lines)
    if short is not None:
        field = "workdir" if short == workdir else "config.data.path"
        raise ConfigError(f"{field}={str(short)!r}: {line}")
    return sum(needs.values()), line


def _data(config: ConfigDict) -> tuple[Any, str]:
    data = build.data_set(config)
    if not isinstance(data, source.Videos):
        return data, f"{data.title}: {len(data.training())} clips"
    if latent_cache.exists(data.path / source.LATENTS):
        data.cache.verify()
        train, held = data.training(), data.cache.split("heldout")
        skipped = len(data.cache.skipped)
        return data, f"{len(train)} clips to train on, {len(held)} held out, {skipped} skipped; every checksum is right"
    folder = VideoFolder(data.path, frames=data.frames, fps=config.data.fps, size=data.size, long_size=data.long_size)
    line = f"{len(folder)} videos to encode, {len(folder.skipped)} skipped"
    for name, reason in folder.skipped[:5]:
        line += f"; {name}: {reason}"
    if len(folder) <= data.heldout:
        raise ConfigError(
            f"config.eval.heldout_clips={data.heldout}: must be below the number of usable videos; {line}"
        )
    return data, line


def _prompts(config: ConfigDict) -> tuple[Any, str]:
    _, _, height, width = build.data_set(config).video_shape
    prompts = build.read_prompts(config, "eval.prompts")
    try:
        for picture in {p.image for p in prompts if p.image}:
            read_image(picture, height, width)
    except ValueError as error:
        raise ConfigError(f"config.eval.prompts={config.eval.prompts!r}: {error}") from error
    return prompts, f"{len(prompts)} captions, {sum(p.image is not None for p in prompts)} with a first frame"


def _codec(config: ConfigDict, mesh: Mesh) -> tuple[Any, str]:
    """A moving gradient there and back: any VAE of pictures keeps it."""
    codec = build.build_codec(config, mesh)
    C, T, H, W = build.data_set(config).video_shape
    T, H, W = min(T, 9), min(H, 128), min(W, 128)
    rows, columns = np.linspace(-0.8, 0.8, H)[:, None], np.linspace(-0.5, 0.5, W)
    ramp_THW = np.stack([np.clip(rows + np.roll(columns, t), -1, 1) for t in range(T)])
    video = np.broadcast_to(ramp_THW.astype(np.float32), (1, C, T, H, W))
    latents = codec.encode(video)
    back = codec.decode(latents)
    if not np.isfinite(back).all():
        raise ConfigError(f"config.codec.path={config.codec.path!r}: a clip comes back with values that are not finite")
    error = float(np.sqrt(np.mean((np.clip(back, -1, 1) - video) ** 2)))
    mean, std = float(latents.mean()), float(latents.std())
    line = WARNING if error > 0.2 else ""
    line += f"round trip of a test clip: error {error:.3f} (root mean square, pixels in [-1, 1])"
    line += ", far from a trained VAE's, below 0.1" if error > 0.2 else ""
    return (codec, latents), f"{line}; latents of mean {mean:.2f}, std {std:.2f}"


def _text(config: ConfigDict, mesh: Mesh) -> tuple[Any, str]:
    if not config.text_encoder.path:
        return None, f"a table of {len(build.data_set(config).vocabulary)} words"
    if config.text_encoder.where != "device":
        build.check_text_files(config)
        if config.text_encoder.where == "cached":
            cache = build.text_cache(config)  # what is stored is of this tower ...
            data = build.data_set(config)
            if isinstance(data, source.Videos) and latent_cache.exists(data.path / source.LATENTS):
                cache.verify(data.cache.captions)  # ... and whole
        return (
            None,
            f"by the {'sidecar' if config.text_encoder.where == 'sidecar' else 'cache'}; the tower's files are there",
        )
    return None, _text_statistics(config, build.text_tower(config, mesh).embed(list(CAPTIONS)))


def _text_statistics(config: ConfigDict, features: Any) -> str:
    """A line about the features of two captions. Raises ConfigError for such as no text tower has."""
    features = np.asarray(features, np.float32)
    apart = float(np.abs(features[0] - features[1]).mean())
    field = f"config.text_encoder.path={config.text_encoder.path!r}"
    if not np.isfinite(features).all():
        raise ConfigError(f"{field}: features are not finite")
    if apart == 0:
        raise ConfigError(f"{field}: two captions have the same features; its tokenizer is at fault")
    shape = " x ".join(map(str, features.shape[1:]))
    return (
        f"features {shape} of mean {features.mean():.3f}, std {features.std():.3f}; two captions are {apart:.3f} apart"
    )


def _network(config: ConfigDict, mesh: Mesh) -> tuple[Any, str]:
    params = build.init_params(config, mesh, jax.random.key(config.seed))
    denoise = build.denoiser(config, config.process.name, mesh)
    C, T, H, W = build.latent_shape(config)
    context = mesh.shape["context"]
    frames = min(T, 3) if context == 1 else min(T, context)
    shape = (mesh_lib.batch_shards(mesh), C, frames, min(H, 16), min(W, 16))
    cond = build.cond(jnp.zeros((1, config.text.length, config.text.dim), jnp.float32))
    x = jax.random.normal(jax.random.key(0), shape)
    y = jax.jit(lambda p, x: denoise(p, x, jnp.ones(shape[0]), cond))(params, x)
    y = np.asarray(y)
    if not np.isfinite(y).all():
        raise ConfigError(f"config.model.checkpoint={config.model.checkpoint!r}: one forward is not finite")
    count = sum(x.size for x in jax.tree.leaves(params))
    origin = config.model.checkpoint or "drawn at random"
    # x0 + e of unit variance each: a denoiser's answer to x lies well below x.
    return params, f"{count:,} parameters ({origin}); one forward: std {y.std():.3f} of an input of std {x.std():.3f}"


def _caption(config: ConfigDict) -> str:
    """A caption that the text encoder and the scorers take."""
    words = build.data_set(config)
    return CAPTIONS[0] if isinstance(words, source.Videos) else words.evaluation_prompts(1)["caption"][0]


def _sidecar(config: ConfigDict, workdir: Path, report: _Report) -> tuple[Any, str]:
    _, latents = report.need("codec")
    caption = _caption(config)
    book = Logbook(workdir, primary=False, tensorboard=False)
    mesh = report.need("devices")
    text = build.build_text(config, mesh) if config.text_encoder.where == "sidecar" else None
    # Not in the workdir, which may be another run's any moment.
    with tempfile.TemporaryDirectory(prefix="ddrl_check_") as folder:
        probe = {"latent": latents, "caption": [caption]}
        with scoring.open_rewards(config, text, Path(folder), book, probe) as client:
            began = time.perf_counter()
            scores = client.submit(latents, [caption]).result()
            seconds = time.perf_counter() - began
            if text is not None:
                _text_statistics(config, text.embed(list(CAPTIONS)))
    shown = ", ".join(f"{name} {float(value[0]):.3g}" for name, value in scores.scores.items())
    rollouts = config.rollout.conditions * config.rollout.group_size
    times = rollouts * math.prod(build.latent_shape(config)) / latents.size
    line = (
        f"answers at {client.url}; a test clip has {shown}; at its rate, pixel for pixel, the {rollouts} clips of an "
        f"iteration take {times * seconds / 60:.1f} min (reward.device, reward.threads)"
    )
    if times * seconds > config.reward.timeout_s * rollouts:
        raise ConfigError(f"config.reward.timeout_s={config.reward.timeout_s:g}: {line}: not one clip would be in time")
    return None, line
